"""The space of layouts as columns: every combination of degrees and choices that a stack can run.

A degree of freedom stands here only when the laws price everything it moves, and only for a stack that can run it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadmaster.describe.layout import Layout
from loadmaster.describe.workload import Workload
from loadmaster.program.dimensions import Dimensions
from loadmaster.units import MIB

__all__ = ["ABILITIES", "NUMERIC", "Ability", "Columns", "degrees", "expand"]

Column = NDArray[Any]

NUMERIC = (
    "dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "zero", "sequence_parallel", "micro_batch_size",
    "virtual_stages", "recompute_blocks", "optimizer_bits", "bucket_bytes", "reduce_each_micro_batch",
    "offload_optimizer", "vocab_padding", "replicate_kv_heads",
)  # fmt: skip
_BOOLEAN = ("sequence_parallel", "reduce_each_micro_batch", "offload_optimizer", "replicate_kv_heads")

MOST_SEQUENCES = 64  # of a micro-batch: far beyond where a device is full
_ALL = ("tp", "pp", "cp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ability:
    """What a stack can run.

    Attributes:
        axes: parallel axes beside the data axes; zero: stages over dp_shard; replicas: shards may be replicated.
        schedules, recompute, optimizer_bits, buckets, offload: choices it has.
    """

    axes: tuple[str, ...] = ()
    zero: tuple[int, ...] = (0, 1, 2, 3)
    replicas: bool = True
    schedules: tuple[str, ...] = ("1f1b",)
    recompute: tuple[str, ...] = ("none", "full", "blocks")
    optimizer_bits: tuple[int, ...] = (32,)
    buckets: tuple[int, ...] = (25 * MIB,)
    offload: bool = False

    def runs(self, layout: Layout, *, beside: Layout) -> bool:
        """Whether it can run what `layout` changes against `beside`."""
        changed = {name for name in ("zero", "recompute", "optimizer_bits", "offload_optimizer", *_ALL)
                   if getattr(layout, name) != getattr(beside, name)}  # fmt: skip
        allowed = {
            "zero": layout.zero in self.zero, "recompute": layout.recompute in self.recompute,
            "optimizer_bits": layout.optimizer_bits in self.optimizer_bits, "offload_optimizer": self.offload,
            **{axis: axis in self.axes for axis in _ALL},
        }  # fmt: skip
        return all(allowed[name] for name in changed)


_PIPELINES = ("1f1b", "interleaved_1f1b")
ABILITIES: Mapping[str, Ability] = {
    "loadmaster": Ability(optimizer_bits=(32, 8)),
    "megatron": Ability(
        axes=_ALL, zero=(0, 1), schedules=_PIPELINES, recompute=("none", "selective", "full", "blocks")
    ),
    "megatron-deepspeed": Ability(axes=("tp", "pp"), zero=(0, 1), replicas=False, recompute=("none", "full")),
    "nanotron": Ability(axes=("tp", "pp"), zero=(0, 1), replicas=False, recompute=("none",)),
    "fsdp2": Ability(axes=("tp", "cp"), zero=(2, 3), recompute=("none", "selective", "full")),
    "torchtitan": Ability(
        axes=_ALL, zero=(2, 3), schedules=(*_PIPELINES, "zb_v"), recompute=("none", "selective", "full")
    ),
    "deepspeed": Ability(replicas=False, recompute=("none", "full")),
    "accelerate": Ability(zero=(0, 2, 3), recompute=("none", "full")),
    "composer": Ability(zero=(2, 3), recompute=("none", "full")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Layouts that share their choices by name: a column for every numeric field of `Layout`.

    The laws take it as they take a `Layout`.
    """

    fields: Mapping[str, Column]
    schedule: str = "1f1b"
    recompute: str = "none"
    precision: str = "bf16-mixed"

    def __getattr__(self, name: str) -> Column:
        try:
            column: Column = object.__getattribute__(self, "fields")[name]
        except KeyError:
            raise AttributeError(name) from None
        return column

    def __len__(self) -> int:
        return len(self.fields["tp"])

    @property
    def dp(self) -> Column:
        """Ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> Column:
        """Ranks."""
        return self.dp * self.tp * self.pp * self.cp

    def num_micro_batches(self, workload: Workload) -> Column:
        """Forwards of a rank in a step; whole where the batch rule holds."""
        whole: Column = workload.global_batch_size // (self.dp * self.micro_batch_size)
        return np.maximum(whole, 1)

    def involved(self) -> Column:
        """How involved a layout is, a row each: its model-parallel degrees multiplied, then replicas and recompute."""
        degrees = self.tp * self.pp * self.cp * self.ep * self.virtual_stages
        recompute = {"none": 0, "full": 1}.get(self.recompute, 2)
        return np.broadcast_to(4 * degrees + (np.asarray(self.dp_replicate) > 1) + recompute, (len(self),))

    def take(self, rows: Any) -> Columns:
        """Some of the rows, by mask or index."""
        return replace(self, fields={name: column[rows] for name, column in self.fields.items()})

    def compact(self) -> Columns:
        """The same with a plain number for every column that holds one value only: laws then count it once."""
        fields = {name: column[0].item() if len(column) and (column == column[0]).all() else column
                  for name, column in self.fields.items()}  # fmt: skip
        return replace(self, fields=fields)

    def chunks(self, size: int) -> Iterator[Columns]:
        """Pieces of at most `size` rows, which stay in the processor's cache."""
        for start in range(0, len(self), size):
            yield self.take(slice(start, start + size))

    def layout(self, row: int) -> Layout:
        """One row as a value."""
        numbers = {name: int(self.fields[name][row]) for name in NUMERIC}
        numbers.update({name: bool(numbers[name]) for name in _BOOLEAN})
        blocks = numbers["recompute_blocks"] if self.recompute == "blocks" else 0
        return Layout(
            **{**numbers, "recompute_blocks": blocks},  # type: ignore[arg-type]
            schedule=self.schedule, recompute=self.recompute, precision=self.precision,
        )  # fmt: skip


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0] if number <= 4096 else _large_divisors(number)


def _large_divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def degrees(dims: Dimensions, num_devices: int, ability: Ability, workload: Workload) -> Columns:
    """Every factorisation of the devices into the axes, legal or not, and every micro-batch size."""
    grid = _factorisations(num_devices, ability)
    experts = _divisors(max(dims.experts)) if "ep" in ability.axes and dims.experts else [1]
    grid = _cross(grid, "ep", experts)
    sizes = [b for b in range(1, MOST_SEQUENCES + 1) if workload.global_batch_size % b == 0]
    grid = _cross(grid, "micro_batch_size", sizes)
    return Columns(fields=_with_defaults(grid))


def _factorisations(number: int, ability: Ability) -> dict[str, Column]:
    """Rows of (tp, pp, cp, dp_replicate, dp_shard) whose product is `number`."""
    rows: list[tuple[int, ...]] = [(1, 1, 1)]
    for position, axis in enumerate(("tp", "pp", "cp")):
        choices = _divisors(number) if axis in ability.axes else [1]
        rows = [
            (*row[:position], d, *row[position + 1 :]) for row in rows for d in choices
            if number % (row[0] * row[1] * row[2] * d) == 0
        ]  # fmt: skip
    table = []
    for tp, pp, cp in rows:
        data = number // (tp * pp * cp)
        table += [(tp, pp, cp, data // shard, shard) for shard in _shards(data, ability)]
    array = np.array(table, dtype=np.int64)
    return dict(zip(("tp", "pp", "cp", "dp_replicate", "dp_shard"), array.T, strict=True))


def _shards(data: int, ability: Ability) -> list[int]:
    """Shard groups of the data ranks; 1 is plain replication."""
    if not ability.replicas:
        return sorted({1, data})
    return _divisors(data)


def _cross(grid: Mapping[str, Column], name: str, values: Sequence[int]) -> dict[str, Column]:
    """Each row of the grid with each of the values."""
    count = len(next(iter(grid.values())))
    crossed = {key: np.repeat(column, len(values)) for key, column in grid.items()}
    crossed[name] = np.tile(np.array(values, dtype=np.int64), count)
    return crossed


def _with_defaults(grid: Mapping[str, Column]) -> dict[str, Column]:
    """Every numeric field of a layout; sequence parallelism goes with tp, which it never costs anything."""
    plain = Layout()
    count = len(next(iter(grid.values())))
    full: dict[str, Column] = {name: np.full(count, getattr(plain, name), dtype=np.int64) for name in NUMERIC}
    full |= grid
    for name in _BOOLEAN:
        full[name] = full[name].astype(bool)
    full["sequence_parallel"] = full["tp"] > 1
    return full


def expand(
    base: Columns, dims: Dimensions, ability: Ability, *, optimizer_bits: Sequence[int], precision: str
) -> Iterator[Columns]:
    """Every choice on top of legal degrees, one group for each (schedule, recompute).

    Stage 0 of ZeRO goes with dp_shard = 1 and the others with more: other pairs are the same layout written twice.
    """
    base = _crossed(base, "zero", [z for z in (0, 1, 2, 3) if z in ability.zero or z == 0])
    whole = (base.zero == 0) & (base.dp_shard == 1)
    if 0 not in ability.zero:
        whole &= base.dp * base.cp == 1
    keep = whole | ((base.dp_shard * base.cp > 1) & (base.zero > 0) & np.isin(base.zero, ability.zero))
    base = _crossed(_crossed(base.take(keep), "optimizer_bits", optimizer_bits), "bucket_bytes", ability.buckets)
    if ability.offload:
        base = _crossed(base, "offload_optimizer", [False, True])
    for schedule in ability.schedules:
        whole = _scheduled(base, dims, schedule, first=schedule == ability.schedules[0])
        for piped in _by_virtual_stages(whole):
            for recompute in ability.recompute:
                group = _recomputed(piped, dims, recompute)
                if len(group):
                    yield replace(group, schedule=schedule, recompute=recompute, precision=precision)


def _crossed(columns: Columns, name: str, values: Sequence[Any]) -> Columns:
    if len(values) == 1:
        return replace(columns, fields={**columns.fields, name: np.full(len(columns), values[0])})
    return replace(columns, fields=_cross(columns.fields, name, values))


def _scheduled(base: Columns, dims: Dimensions, schedule: str, *, first: bool) -> Columns:
    """Rows with the virtual stages that a schedule takes; one stage only under the first schedule."""
    if schedule in ("zb_v", "dualpipe_v"):
        return _crossed(base.take(base.pp > 1), "virtual_stages", [2])
    if schedule == "interleaved_1f1b":
        piped = base.take(base.pp > 1)
        most = dims.num_layers // 2
        chunks = [v for v in range(2, most + 1) if v <= 8 or dims.num_layers % v == 0]
        wide = _crossed(piped, "virtual_stages", chunks) if chunks else piped.take(slice(0, 0))
        return wide.take(dims.num_layers % (wide.pp * wide.virtual_stages) == 0)
    return base if first else base.take(base.pp > 1)


def _by_virtual_stages(columns: Columns) -> Iterator[Columns]:
    """Rows in groups of like depth: a law that walks the chunks of a rank walks as many as the deepest row has."""
    low = 0
    for high in (1, 2, 4, 8, 16, 32, 64, 1 << 30):
        rows = (columns.virtual_stages > low) & (columns.virtual_stages <= high)
        low = high
        if rows.any():
            yield columns.take(rows)


def _recomputed(piped: Columns, dims: Dimensions, recompute: str) -> Columns:
    """Rows with the number of recomputed blocks a stage, for ``blocks``; the rest as they are."""
    if recompute != "blocks":
        return piped
    layers = -(-dims.num_layers // piped.pp)
    counts = _block_counts(dims.num_layers)
    wide = _crossed(piped, "recompute_blocks", counts)
    return wide.take(wide.recompute_blocks < np.repeat(layers, len(counts)))


def _block_counts(num_layers: int) -> list[int]:
    """Numbers of blocks worth trying: all up to 8, then in steps of an eighth."""
    small = list(range(1, min(num_layers, 9)))
    return small + [n for n in range(9, num_layers) if n % max(1, num_layers // 8) == 0]
