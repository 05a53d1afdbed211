"""What a run measured, over all ranks: the memory, traffic and time ledgers that a prediction is set against."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch.distributed as dist

from loadmaster.ledger import Ledger
from loadmaster.runtime.engine import Engine
from loadmaster.runtime.metrics import StepRecord

__all__ = ["gather_outcome", "typical_step"]

WARM_UP = 2  # steps that allocate and learn the order of buckets; not typical


def typical_step(phases: Sequence[Ledger]) -> Ledger:
    """The median of each phase over the steps after the warm-up.

    >>> steps = [Ledger("seconds", {"forward": t}) for t in (9.0, 9.0, 1.0, 2.0, 3.0)]
    >>> typical_step(steps)["forward"]
    2.0
    """
    steps = list(phases[WARM_UP:] or phases)
    names = list(dict.fromkeys(name for step in steps for name in step))
    return Ledger("seconds", {name: median(step[name] for step in steps) for name in names})


def gather_outcome(
    engine: Engine, memory: Ledger, records: Sequence[StepRecord], phases: Sequence[Ledger], *, first_step: int
) -> dict[str, Any]:
    """Ledgers of the worst rank by memory, the busiest by traffic, the slowest by time, and of every rank."""
    mine = {
        "memory": memory.to_json(), "traffic": engine.traffic_ledger().to_json(),
        "messages": engine.message_ledger().to_json(), "time": typical_step(phases).to_json(),
    }  # fmt: skip
    ranks: list[Any] = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
    worst = {kind: max((rank[kind] for rank in ranks), key=lambda ledger: ledger["total"]) for kind in mine}
    steps = list(records[WARM_UP:] or records)
    return {
        "measured": worst,
        "ranks": ranks,
        "first_step": first_step,
        "losses": [record.loss for record in records],
        "final_loss": records[-1].loss if records else None,
        "recent_loss": _mean([record.loss for record in records[-10:]]),
        "eval_loss": next((r.eval_loss for r in reversed(records) if r.eval_loss is not None), None),
        "step_seconds": median(r.seconds for r in steps) if steps else None,
        "tokens_per_second": median(r.tokens_per_second for r in steps) if steps else None,
        "mfu": median(r.mfu for r in steps if r.mfu is not None) if steps and steps[0].mfu is not None else None,
        "flops_per_second_per_device": median(r.flops_per_second for r in steps) if steps else None,
    }


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None
