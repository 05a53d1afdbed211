"""This machine as a cluster file: what its devices and links really do, with spread and provenance."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadmaster.describe.cluster import Cluster, Device, Link
from loadmaster.describe.toml import dumps, write_atomic
from loadmaster.errors import InvalidInput
from loadmaster.ranks import run_ranks
from loadmaster.units import KIB, MIB

__all__ = ["Effort", "Measurement", "measure", "measure_in_full", "measure_rank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long to look.

    Attributes:
        dtypes, matrix_sizes, matrix_seconds: of the matrix products; copy_bytes: of the memory copy.
        message_sizes, repeats: of the collectives.
    """

    dtypes: tuple[str, ...] = ("fp32", "bf16")
    matrix_sizes: tuple[int, ...] = (384, 768)
    matrix_seconds: float = 0.25
    copy_bytes: int = 64 * MIB
    message_sizes: tuple[int, ...] = (4 * KIB, 64 * KIB, MIB, 8 * MIB)
    repeats: int = 20


QUICK = Effort()
THOROUGH = Effort(
    dtypes=("fp32", "bf16", "fp16"), matrix_sizes=(256, 512, 1024, 2048), matrix_seconds=1.5, copy_bytes=256 * MIB,
    message_sizes=tuple(4 * KIB << 2 * i for i in range(8)), repeats=60,
)  # fmt: skip
CUDA = Effort(dtypes=("fp32", "tf32", "bf16", "fp16"), matrix_sizes=(4096, 8192), copy_bytes=1024 * MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A cluster and how it was measured.

    Attributes:
        rates: by name, value and spread; operations: by tier and operation, the fitted line and its samples.
        provenance: software, host, date.
    """

    cluster: Cluster
    rates: Mapping[str, Mapping[str, float]]
    operations: Mapping[str, Mapping[str, Any]]
    provenance: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The tables of the cluster file."""
        return {
            **self.cluster.to_dict(), "rates": dict(self.rates), "collectives": dict(self.operations),
            "provenance": dict(self.provenance),
        }  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cluster file whole or not at all; `Cluster.load` reads it."""
        head = "# Measured by `loadmaster measure`: bytes, seconds, FLOP/s. Give it as --on in plan and price.\n"
        write_atomic(path, head + dumps(self.to_dict()))


def measure(*, ranks: int = 2, thorough: bool = False, memory_cap: int | None = None, device: str = "auto") -> Cluster:
    """This machine as a cluster; the arguments are those of `measure_in_full`."""
    return measure_in_full(ranks=ranks, thorough=thorough, memory_cap=memory_cap, device=device).cluster


def measure_in_full(
    *, ranks: int = 2, thorough: bool = False, memory_cap: int | None = None, device: str = "auto",
    effort: Effort | None = None, quiet: bool = True,
) -> Measurement:  # fmt: skip
    """Measure this host with `ranks` processes at work together, or, under torchrun, the ranks that run.

    Args:
        ranks: local processes to start.
        thorough: more sizes, more repeats, minutes instead of seconds.
        memory_cap: bytes a rank may use, if less than it has.
        device: ``cpu``, ``cuda`` or ``auto``.
        effort: in place of the quick or the thorough form.
        quiet: no progress bar.

    Raises:
        InvalidInput: no ranks, or more of them than the host has cores.
    """
    cores = os.cpu_count() or 1
    if not 1 <= ranks <= 4 * cores:
        raise InvalidInput("--ranks", ranks, f"is not from 1 to {4 * cores} on a host of {cores} cores", "use fewer")
    if memory_cap is not None and memory_cap < 1:
        raise InvalidInput("--memory-cap", memory_cap, "must be at least one byte", "write e.g. 1GiB")
    payload = {
        "thorough": thorough, "device": device, "quiet": quiet,
        "effort": dataclasses.asdict(effort) if effort is not None else None,
    }  # fmt: skip
    if "TORCHELASTIC_RUN_ID" in os.environ:
        found = measure_rank(payload)
    else:
        found = run_ranks("loadmaster.probe.measure:measure_rank", payload, world_size=ranks)[0]
    return _assemble(found, memory_cap)


def measure_rank(payload: Mapping[str, Any]) -> dict[str, Any]:
    """One rank's part; all return the figures of the slowest."""
    import torch
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    place = _place(payload["device"], int(os.environ.get("LOCAL_RANK", rank)))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo")
    try:
        effort = _effort(payload, place.type)
        tiers = {"intra_node": local, "inter_node": world_size // local}
        with _Bar(_num_steps(effort, tiers), quiet=bool(payload["quiet"]) or rank > 0) as bar:
            rates = dict(_rates(place, effort, bar))
            operations = _tiers(place, effort, tiers, bar)
        facts = _facts(place, local, torch.get_num_threads())
        return {**facts, "rates": rates, "operations": operations, "num_nodes": world_size // local, "local": local}
    finally:
        dist.destroy_process_group()


def _place(wanted: str, local_rank: int) -> Any:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted not in ("auto", "cpu", "cuda"):
        raise InvalidInput("--device", wanted, "is not known", "use cpu, cuda or auto")
    if wanted == "cuda" and count <= local_rank:
        raise InvalidInput("--device", "cuda", f"local rank {local_rank} has none ({count} found)", "use cpu")
    if wanted == "cpu" or count <= local_rank:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _effort(payload: Mapping[str, Any], kind: str) -> Effort:
    if payload["effort"] is not None:
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in payload["effort"].items()}
        return Effort(**fields)
    if kind == "cuda":
        return dataclasses.replace(CUDA, matrix_seconds=1.0, repeats=60) if payload["thorough"] else CUDA
    return THOROUGH if payload["thorough"] else QUICK


def _num_steps(effort: Effort, tiers: Mapping[str, int]) -> int:
    return len(effort.dtypes) + 1 + 4 * len(effort.message_sizes) * sum(size > 1 for size in tiers.values())


def _rates(place: Any, effort: Effort, bar: _Bar) -> Iterator[tuple[str, dict[str, float]]]:
    """Matrix and memory rates, of the slowest rank: a step waits for it."""
    from loadmaster.probe.device import matmul_rate, memory_rate

    for dtype in effort.dtypes:
        bar.next(f"matrix products in {dtype}")
        sizes = effort.matrix_sizes if dtype != "fp16" or place.type == "cuda" else effort.matrix_sizes[:1]
        value, spread = matmul_rate(dtype, place, sizes=sizes, seconds=effort.matrix_seconds)
        yield dtype, {"value": _slowest(value), "spread": spread}
    bar.next("memory")
    value, spread = memory_rate(place, size=effort.copy_bytes, seconds=effort.matrix_seconds)
    yield "memory", {"value": _slowest(value), "spread": spread}


def _slowest(value: float) -> float:
    import torch
    import torch.distributed as dist

    box = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(box, op=dist.ReduceOp.MIN)
    return float(box)


def _tiers(place: Any, effort: Effort, tiers: Mapping[str, int], bar: _Bar) -> dict[str, dict[str, Any]]:
    """Every operation over the ranks of a node, then over one rank of each node."""
    import torch.distributed as dist

    from loadmaster.probe.fit import fit_link
    from loadmaster.probe.links import OPERATIONS, time_operation

    rank, local, nodes = dist.get_rank(), tiers["intra_node"], tiers["inter_node"]
    lanes = {
        "intra_node": [[n * local + i for i in range(local)] for n in range(nodes)],
        "inter_node": [[n * local + i for n in range(nodes)] for i in range(local)],
    }
    found: dict[str, dict[str, Any]] = {}
    for tier, size in tiers.items():
        if size < 2:
            continue
        groups = [dist.new_group(members) for members in lanes[tier]]
        group = next(g for g, members in zip(groups, lanes[tier], strict=True) if rank in members)
        for name in OPERATIONS:
            samples = []
            for sample in time_operation(name, effort.message_sizes, place, group, repeats=effort.repeats):
                samples.append(sample)
                bar.next(f"{name.replace('_', '-')} over {size} ranks, {tier.replace('_', ' ')}")
            found.setdefault(tier, {})[name] = {
                "ranks": size, **dataclasses.asdict(fit_link(samples)),
                **{key: [getattr(s, key) for s in samples] for key in ("wire_bytes", "median", "spread")},
            }  # fmt: skip
    return found


def _facts(place: Any, local: int, threads: int) -> dict[str, Any]:
    import torch

    from loadmaster.probe.device import memory_bytes

    name = torch.cuda.get_device_name(place) if place.type == "cuda" else f"cpu ({_cpu_name()}, {threads} threads)"
    return {
        "device": name, "memory_bytes": memory_bytes(place, local),
        "provenance": {
            "torch": torch.__version__, "python": platform.python_version(), "cpu": _cpu_name(),
            "threads_per_rank": str(threads), "system": f"{platform.system()} {platform.release()}",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        },
    }  # fmt: skip


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _assemble(found: Mapping[str, Any], memory_cap: int | None) -> Measurement:
    provenance, rates = found["provenance"], found["rates"]
    source = f"measured {provenance['date']} with torch {provenance['torch']}, {found['local']} ranks a node at work"
    device = Device(
        name=found["device"], memory_bytes=found["memory_bytes"], memory_bandwidth=rates["memory"]["value"],
        peak_flops={name: rate["value"] for name, rate in rates.items() if name != "memory"},
        source=source, measured=True,
    )  # fmt: skip
    alone = Link(latency=1e-6, bandwidth=rates["memory"]["value"] / 2, name="one rank: memory copy")
    intra = _link(found["operations"].get("intra_node"), "between local ranks") or alone
    inter = _link(found["operations"].get("inter_node"), "between nodes") or dataclasses.replace(
        intra, name=f"{intra.name} (one node: no other measured)"
    )
    cluster = Cluster(
        device=device, devices_per_node=found["local"], num_nodes=found["num_nodes"], intra_node=intra,
        inter_node=inter, memory_cap=memory_cap, source=source,
    )  # fmt: skip
    return Measurement(cluster=cluster, rates=rates, operations=found["operations"], provenance=provenance)


def _link(operations: Mapping[str, Any] | None, name: str) -> Link | None:
    """A tier's link is the ring's hop: each rank sends to the next and receives from the one before at once."""
    if operations is None:
        return None
    return Link(latency=operations["hop"]["latency"], bandwidth=operations["hop"]["bandwidth"], name=name)


class _Bar:
    """Progress on stderr."""

    def __init__(self, steps: int, *, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(stderr=True, emoji=False)
        self.bar = Progress(
            BarColumn(bar_width=20), TextColumn("{task.description}"), console=console, transient=True,
            disable=quiet or not console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task("starting", total=steps)

    def __enter__(self) -> _Bar:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def next(self, text: str) -> None:
        """One piece of the work is done, or begun."""
        self.bar.update(self.task, advance=1, description=text)
