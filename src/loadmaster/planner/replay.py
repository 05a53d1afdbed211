"""The oracle of the closed form: a layout's pipeline played action by action, with each stage's own seconds."""

from __future__ import annotations

from collections.abc import Sequence

from loadmaster.describe.stack import Stack
from loadmaster.laws.cost import Cost
from loadmaster.laws.step import stage_seconds
from loadmaster.program.schedule import build_schedule
from loadmaster.program.stages import assign_stages, balanced_by_cost

__all__ = ["MOST_ACTIONS", "better_split", "replayed_seconds"]

MOST_ACTIONS = 30_000  # of a table: longer ones keep the closed form
MOST_CUTS = 300_000  # that the search for a better split looks at
_PIPELINE = (
    "forward", "backward", "recompute", "communication/tp", "communication/cp", "communication/ep", "communication/pp",
    "host", "straggler", "bubble",
)  # fmt: skip


def replayed_seconds(cost: Cost, stack: Stack, *, split: Sequence[int] | None = None) -> float:
    """Seconds of a step whose pipeline is replayed; without stages, or with a table too long, those of the law.

    Args:
        split: layers of each stage in model order, where they are not even.
    """
    layout = cost.layout
    count = layout.num_micro_batches(cost.workload)
    by_cost = stack.placement == "cost"  # stages that a stack balances itself are the law's own
    if layout.pp == 1 or by_cost or 3 * layout.pp * layout.virtual_stages * count > MOST_ACTIONS:
        return cost.step_seconds
    stages = assign_stages(
        cost.model.num_layers, layout.pp, virtual_stages=layout.virtual_stages, schedule=layout.schedule, split=split
    )
    layers = tuple(stage.num_layers for stage in stages)
    seconds = stage_seconds(cost.model, cost.cluster, cost.workload, layout, stack, layers)
    table = build_schedule(layout.schedule, pp=layout.pp, num_micro_batches=count, virtual_stages=layout.virtual_stages)
    played = table.replay(seconds.forward.__getitem__, seconds.backward.__getitem__).seconds
    return cost.step_seconds - sum(cost.time[term] for term in _PIPELINE) + played


def better_split(cost: Cost, stack: Stack, usable: float) -> tuple[tuple[int, ...], float] | None:
    """Layers a stage that make the slowest stage as fast as can be, and the step's seconds; None where even is best.

    The head is worth several layers, so the last stage gets fewer. The other stages get more: the split counts only if
    the fullest rank still fits with its layers grown in proportion.
    """
    layout, layers = cost.layout, cost.model.num_layers
    chunks = layout.pp * layout.virtual_stages
    if layout.pp == 1 or stack.placement == "cost" or chunks * layers**2 > MOST_CUTS:
        return None
    even = assign_stages(layers, layout.pp, virtual_stages=layout.virtual_stages, schedule=layout.schedule)
    # one layer a stage tells what a layer costs, none what the ends add
    costs = [stage_seconds(cost.model, cost.cluster, cost.workload, layout, stack, (n,) * chunks) for n in (0, 1)]
    ends, ones = ([f + b for f, b in zip(c.forward, c.backward, strict=True)] for c in costs)
    middle = ends[1] if chunks > 2 else min(ends)
    split = balanced_by_cost(
        [ones[0] - ends[0]] * layers, chunks, embedding=ends[0] - middle, head=max(ends[-1] - middle, 0.0)
    )
    grown = max(split) / max(stage.num_layers for stage in even)
    if max(grown, 1.0) * cost.memory.total > usable:
        return None
    seconds = replayed_seconds(cost, stack, split=split)
    return (split, seconds) if seconds < 0.995 * cost.step_seconds else None
