"""What the caching allocator reserves beyond the live bytes: sizes that do not nest, flat tensors, deferred frees."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from loadmaster.describe.model import Model
from loadmaster.describe.op import Split
from loadmaster.laws.numbers import Number, greater, lesser, where
from loadmaster.laws.run import Run

__all__ = ["reserved_beyond_live"]

Terms = dict[str, Number]

_FULL = 0.96  # of the device's bytes are the most that a run was seen to reserve (76.9 of 80 GiB)
_LEAST = 0.06  # of the live bytes stay unusable even so: no run with more live bytes than this leaves room for finished


def reserved_beyond_live(run: Run, *, state: Number, step: Number, passes: Number, kept: Terms) -> Number:
    """Bytes reserved beyond the live ones.

    ``state share + activation share + copies of the stream + the smaller of (step, passes) * step share + fixed``.

    Args:
        run: the pricing.
        state: bytes that exist throughout; step: of the optimizer step alone.
        passes: of the worst moment of forward and backward; kept: the saved tensors among them, by term.
    """
    if run.on_cpu:
        return 0
    rule = run.stack.allocator
    kept_share = rule.activations + (rule.odd_sizes if _odd(run.model) else 0.0)
    share = (
        state * rule.state
        + sum(kept.values()) * kept_share
        + lesser(step, passes) * rule.step
        + _copies(run)
        + rule.fixed
    )
    if rule.checkpoints:
        share = share + kept.get("activations/checkpoint", 0) * rule.checkpoints
    # a full device makes the allocator wait, give back cached blocks and use them again
    live = state + greater(passes, step)
    share = lesser(share, greater(run.cluster.memory_bytes * _FULL - live, live * _LEAST))
    return np.ceil(share) if isinstance(share, np.ndarray) else math.ceil(share)


@lru_cache(maxsize=256)
def _odd(model: Model) -> bool:
    """Whether a block's widest split value is no multiple of half the stream: freed blocks then do not fit again."""
    widths = [v.width for block, _ in model.blocks for v in block.values if v.split is Split.TP]
    return bool(widths) and (2 * max(widths)) % model.hidden_size != 0


def _copies(run: Run) -> Number:
    """Unsharded copies of the stream: the fixed ones, and those that wait for the communication stream."""
    rule, layout = run.stack.allocator, run.layout
    if not rule.streams and not rule.deferral.copies:
        return 0
    stream = run.tokens * run.model.hidden_size * run.compute_bytes
    waiting: Number = 0
    for stages, by_tp in rule.deferral.copies:
        column: Number = by_tp[4]
        for degree, number in zip((16, 8, 4, 2), by_tp[3::-1], strict=True):
            column = where(layout.tp <= degree, number, column)
        waiting = where(layout.pp >= stages, column, waiting)
    lone = (layout.pp == 1) & (run.micro_batches == 1)
    waiting = where(lone, greater(waiting - rule.deferral.single, 0), waiting)
    devices = layout.dp_replicate * layout.dp_shard * layout.tp * layout.pp * layout.cp
    seen = (layout.tp > 16) | (devices <= rule.deferral.max_devices)
    return where(layout.tp > 1, stream * (rule.streams + 2 * where(seen, waiting, 0)), 0)
