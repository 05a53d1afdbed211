"""accelerate: the YAML of ``accelerate launch --config_file``, with fully sharded data parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadmaster.describe.plan_file import PlanFile
from loadmaster.describe.precision import Precision
from loadmaster.export.api import Exported, require

__all__ = ["config", "files"]


def files(plan: PlanFile) -> Exported:
    """``accelerate.yaml`` and ``launch.sh``."""
    require(
        plan, "accelerate", {"pp": 1, "ep": 1, "optimizer_bits": 32, "recompute": ("none", "full"), "zero": (0, 2, 3)}
    )
    layout = plan.layout
    notes = (f"pass gradient_accumulation_steps={layout.num_micro_batches(plan.workload)} to Accelerator(), "
             f"micro-batch {layout.micro_batch_size} to the DataLoader",)  # fmt: skip
    return Exported(
        files={"accelerate.yaml": _yaml(config(plan)), "launch.sh": _launch(plan)},
        notes=notes,
    )


def config(plan: PlanFile) -> dict[str, Any]:
    """The document's mapping."""
    layout, cluster = plan.layout, plan.cluster
    compute = Precision.named(layout.precision).compute
    top: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if layout.zero else "MULTI_GPU" if layout.world_size > 1 else "NO",
        "mixed_precision": compute if compute in ("bf16", "fp16") else "no",
        "num_machines": cluster.num_nodes,
        "num_processes": cluster.num_devices,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "c10d" if cluster.num_nodes > 1 else "static",
        "use_cpu": False,
    }
    if layout.zero:
        top["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": layout.zero == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_activation_checkpointing": layout.recompute == "full",
            "fsdp_offload_params": layout.offload_optimizer,
            "fsdp_cpu_ram_efficient_loading": True,
        }
    if layout.tp * layout.cp * layout.dp_replicate > 1 and layout.zero:
        top["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": layout.dp_replicate,
            "parallelism_config_dp_shard_size": layout.dp_shard,
            "parallelism_config_tp_size": layout.tp,
            "parallelism_config_cp_size": layout.cp,
        }
    return top


def _yaml(table: Mapping[str, Any], indent: str = "") -> str:
    """YAML of nested mappings of plain values."""
    text = ""
    for name, value in table.items():
        if isinstance(value, Mapping):
            text += f"{indent}{name}:\n{_yaml(value, indent + '  ')}"
        else:
            plain = str(value).lower() if isinstance(value, bool) else str(value)
            shown = f"'{plain}'" if plain.lower() == "no" else plain
            text += f"{indent}{name}: {shown}\n"
    return text


def _launch(plan: PlanFile) -> str:
    head = "#!/usr/bin/env bash\n# train.py is your script\nset -euo pipefail\n"
    if plan.cluster.num_nodes == 1:
        return head + 'exec accelerate launch --config_file accelerate.yaml train.py "$@"\n'
    cluster = plan.cluster
    return (
        "#!/usr/bin/env bash\n#SBATCH --job-name=accelerate\n"
        f"#SBATCH --nodes={cluster.num_nodes}\n#SBATCH --ntasks-per-node=1\n"
        f"#SBATCH --gpus-per-node={cluster.devices_per_node}\n# train.py is your script\nset -euo pipefail\n"
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        "export first\n"
        'srun bash -c \'exec accelerate launch --config_file accelerate.yaml --machine_rank "$SLURM_NODEID" '
        '--main_process_ip "$first" --main_process_port 29500 train.py "$@"\' launch "$@"\n'
    )
