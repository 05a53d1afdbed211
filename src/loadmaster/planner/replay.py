"""The oracle of the closed form: a layout's pipeline played action by action, with each stage's own seconds."""

from __future__ import annotations

from loadmaster.describe.stack import Stack
from loadmaster.laws.cost import Cost
from loadmaster.laws.step import stage_seconds
from loadmaster.program.schedule import build_schedule
from loadmaster.program.stages import assign_stages

__all__ = ["MOST_ACTIONS", "replayed_seconds"]

MOST_ACTIONS = 60_000  # of a table: longer ones keep the closed form
_PIPELINE = (
    "forward", "backward", "recompute", "communication/tp", "communication/cp", "communication/ep", "communication/pp",
    "host", "straggler", "bubble",
)  # fmt: skip


def replayed_seconds(cost: Cost, stack: Stack) -> float:
    """Seconds of a step whose pipeline is replayed; without stages, or with a table too long, those of the law."""
    layout = cost.layout
    count = layout.num_micro_batches(cost.workload)
    by_cost = stack.placement == "cost"  # stages that a stack balances itself are the law's own
    if layout.pp == 1 or by_cost or 3 * layout.pp * layout.virtual_stages * count > MOST_ACTIONS:
        return cost.step_seconds
    stages = assign_stages(
        cost.model.num_layers, layout.pp, virtual_stages=layout.virtual_stages, schedule=layout.schedule
    )
    layers = tuple(stage.num_layers for stage in stages)
    seconds = stage_seconds(cost.model, cost.cluster, cost.workload, layout, stack, layers)
    table = build_schedule(layout.schedule, pp=layout.pp, num_micro_batches=count, virtual_stages=layout.virtual_stages)
    played = table.replay(seconds.forward.__getitem__, seconds.backward.__getitem__).seconds
    return cost.step_seconds - sum(cost.time[term] for term in _PIPELINE) + played
