"""The script that starts a run on every rank: torchrun alone on one node, under Slurm on more."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from loadmaster.describe.cluster import Cluster

__all__ = ["launch_script"]


def launch_script(cluster: Cluster, command: Sequence[str], *, name: str, comment: str = "") -> str:
    """A bash script; `command` is what torchrun starts, already without torchrun.

    One node: ``bash launch.sh``. More: ``sbatch launch.sh``, one torchrun a node meeting at the first.
    """
    words = " \\\n  ".join([*_pairs(command), '"$@"'])
    head = ["#!/usr/bin/env bash"]
    if cluster.num_nodes > 1:
        head += [
            f"#SBATCH --job-name={name}",
            f"#SBATCH --nodes={cluster.num_nodes}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --gpus-per-node={cluster.devices_per_node}",
            "#SBATCH --exclusive",
        ]
    lines = [*head, *([f"# {comment}"] if comment else []), "set -euo pipefail", ""]
    if cluster.num_nodes == 1:
        lines += [f"exec torchrun --standalone --nproc-per-node={cluster.devices_per_node} \\\n  {words}"]
        return "\n".join(lines) + "\n"
    lines += [
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "exec srun torchrun \\",
        f"  --nnodes={cluster.num_nodes} --nproc-per-node={cluster.devices_per_node} \\",
        '  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first:29500" \\',
        f"  {words}",
    ]
    return "\n".join(lines) + "\n"


def _pairs(command: Sequence[str]) -> list[str]:
    """Words quoted for bash, an option and its value on one line; ``$`` words are left to the shell."""
    lines: list[str] = []
    for word in command:
        quoted = word if word.startswith(('"$', "$")) else shlex.quote(word)
        if lines and not word.startswith("-") and lines[-1].startswith("--") and " " not in lines[-1]:
            lines[-1] += f" {quoted}"
        else:
            lines.append(quoted)
    return lines
