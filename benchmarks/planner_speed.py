"""How fast the planner is: layouts priced a second on one core, the largest plan as a whole process, growth.

OMP_NUM_THREADS=1 python benchmarks/planner_speed.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.families import read_config
from loadmaster.describe.model import Model
from loadmaster.describe.stack import Stack
from loadmaster.describe.workload import Workload
from loadmaster.planner.priced import legal_rows, price_space
from loadmaster.planner.search import ability_of
from loadmaster.planner.space import degrees, expand
from loadmaster.program.dimensions import Dimensions


def llama_405b(layers: int = 126) -> dict[str, object]:
    """Llama 3.1 405B (arXiv 2407.21783, table 3), with another depth where asked for."""
    _, config = read_config("meta-llama/Llama-3.1-70B")
    return {
        **config, "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128,
        "num_hidden_layers": layers, "num_key_value_heads": 8,
    }  # fmt: skip


def priced(layers: int, devices: int, batch: int = 2048) -> tuple[int, float, float]:
    """Layouts of the whole space, wall seconds and processor seconds to price them all."""
    model, stack = Model.from_hf(llama_405b(layers)), Stack.named("megatron")
    cluster, work = Cluster.parse(f"{devices}xh100-sxm"), Workload(global_batch_size=batch, seq_len=8192)
    dims, ability = Dimensions.of(model), ability_of(stack, None)
    wall, busy = perf_counter(), process_time()
    base = degrees(dims, devices, ability, work)
    base = base.take(legal_rows(dims, work, base, cluster))
    groups = expand(base, dims, ability, optimizer_bits=(32,), precision="bf16-mixed")
    space = price_space(model, cluster, work, stack, dims, groups)
    return len(space), perf_counter() - wall, process_time() - busy


def whole_process(repeats: int) -> list[tuple[float, float]]:
    """Wall and processor seconds of ``loadmaster plan`` for 405B on 16,384 H100, start and output included."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(llama_405b()))
        command = [
            sys.executable, "-m", "loadmaster", "plan", str(config), "--on", "16384xh100-sxm", "--batch", "16Mi",
            "--seq", "8192", "--stack", "megatron", "--json",
        ]  # fmt: skip
        found = []
        for _ in range(repeats):
            before, start = os.times(), perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            after = os.times()
            busy = after.children_user + after.children_system - before.children_user - before.children_system
            found.append((perf_counter() - start, busy))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    priced(126, 1024)  # warm: caches of op tables, imports
    print(f"{'layers':>7} {'devices':>8} {'layouts':>9} {'wall s':>7} {'cpu s':>7} {'layouts / cpu s':>16}")
    for layers, devices in [(126, d) for d in (64, 256, 1024, 4096, 16384)] + [(n, 4096) for n in (16, 32, 64, 256)]:
        runs = [priced(layers, devices) for _ in range(repeats)]
        count, wall, busy = runs[0][0], min(r[1] for r in runs), min(r[2] for r in runs)
        print(f"{layers:>7} {devices:>8} {count:>9,} {wall:>7.2f} {busy:>7.2f} {count / busy:>16,.0f}")
    runs = whole_process(repeats)
    wall, busy = (statistics.median(column) for column in zip(*runs, strict=True))
    print(f"405B on 16,384 H100, whole process: median {wall:.2f} s wall, {busy:.2f} s of processor")


if __name__ == "__main__":
    main()
