"""What to change in one layout to save memory, ranked by bytes saved per second lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from loadmaster.describe.layout import Layout
from loadmaster.describe.stack import Stack
from loadmaster.describe.workload import Workload
from loadmaster.errors import InvalidInput
from loadmaster.laws.cost import Cost, price
from loadmaster.planner.space import ABILITIES

__all__ = ["Remedy", "remedies"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change and what it does to the layout it was tried on.

    Attributes:
        change: as one would write it in a layout; bytes_saved: at the peak; seconds_added: to a step.
        fits: whether the layout fits with this change alone.
    """

    change: str
    bytes_saved: int
    seconds_added: float
    fits: bool
    layout: Layout

    @property
    def worth(self) -> float:
        """Bytes saved per second lost; infinite where no time is lost."""
        return float("inf") if self.seconds_added <= 0 else self.bytes_saved / self.seconds_added

    def to_json(self) -> dict[str, Any]:
        """The document's form."""
        return {
            "change": self.change, "bytes_saved": self.bytes_saved, "seconds_added": self.seconds_added,
            "fits": self.fits,
        }  # fmt: skip


def remedies(cost: Cost, *, stack: Stack | None = None) -> list[Remedy]:
    """Every single change that saves memory, the best bargain first ("cut first")."""
    ability = ABILITIES.get(cost.stack)
    found: dict[str, Remedy] = {}
    for change, layout, workload in _changes(cost):
        if ability is not None and not ability.runs(layout, beside=cost.layout):
            continue
        try:
            other = price(cost.model, cost.cluster, workload, layout, stack=stack or cost.stack)
        except InvalidInput:
            continue
        saved = int(cost.memory.total - other.memory.total)
        if saved > 0:
            found[change] = Remedy(
                change=change, bytes_saved=saved, seconds_added=other.step_seconds - cost.step_seconds,
                fits=other.fits, layout=layout,
            )  # fmt: skip
    return sorted(found.values(), key=lambda r: (-r.worth, -r.bytes_saved))


def _changes(cost: Cost) -> Iterator[tuple[str, Layout, Workload]]:
    """Neighbours of the layout that could need less memory, each with one change."""
    layout, workload = cost.layout, cost.workload
    for text, fields in _layout_changes(layout):
        try:
            yield text, replace(layout, **fields), workload
        except InvalidInput:
            continue
    if workload.loss == "cross_entropy":
        yield "loss=fused", layout, replace(workload, loss="fused")


def _layout_changes(layout: Layout) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in ("selective", "full"):
        if layout.recompute not in (name, "full"):
            yield f"recompute={name}", {"recompute": name, "recompute_blocks": 0}
    for size in sorted({layout.micro_batch_size // 2, 1}):
        if 0 < size < layout.micro_batch_size:
            yield f"micro_batch_size={size}", {"micro_batch_size": size}
    for zero in range(layout.zero + 1, 4):
        if layout.dp_shard > 1:
            yield f"zero={zero}", {"zero": zero}
    if layout.dp_replicate > 1:
        shards = layout.dp_replicate * layout.dp_shard
        yield (
            f"dp_replicate=1,dp_shard={shards},zero={max(1, layout.zero)}",
            {"dp_replicate": 1, "dp_shard": shards, "zero": max(1, layout.zero)},
        )
    if layout.optimizer_bits == 32:
        yield "optimizer_bits=8", {"optimizer_bits": 8}
    if not layout.offload_optimizer:
        yield "offload_optimizer=true", {"offload_optimizer": True}
    if layout.tp > 1 and not layout.sequence_parallel:
        yield "sequence_parallel=true", {"sequence_parallel": True}
    yield from _degree_changes(layout)


def _degree_changes(layout: Layout) -> Iterator[tuple[str, dict[str, Any]]]:
    """Twice a model-parallel degree at half the data ranks: only where such a degree is in use already."""
    if layout.dp_shard % 2:
        return
    for axis in ("tp", "pp", "cp"):
        degree = getattr(layout, axis)
        if degree > 1:
            changed = {axis: 2 * degree, "dp_shard": layout.dp_shard // 2}
            yield ",".join(f"{k}={v}" for k, v in changed.items()), changed
