"""Loadmaster's own runtime: transformers' modules run eagerly with PyTorch's SDPA, flat gradient buckets, ZeRO 0-3.

This table is the one place where the saved-tensor rules of our runtime are written; real traces hold it to the byte.
"""

from __future__ import annotations

from loadmaster.describe.stack import Alive, Allocator, Context, Stack, StateLine
from loadmaster.describe.stacks.saving import CHUNKED_LOSS, EAGER, EAGER_LOSS, FUSED_LOSS
from loadmaster.units import MIB

SAVING = {**EAGER}

STACK = Stack(
    name="loadmaster",
    title="Loadmaster's runtime: eager transformers modules, SDPA, flat buckets, ZeRO 0-3",
    state=(
        StateLine(term="parameters", dtype="param", zero=3, source="runtime.engine"),
        StateLine(term="gradients", dtype="grad", zero=2, source="runtime.reducer"),
        StateLine(term="optimizer/master", dtype="master", zero=1, source="runtime.zero"),
        StateLine(term="optimizer/exp_avg", dtype="moment", zero=1, source="runtime.optim"),
        StateLine(term="optimizer/exp_avg_sq", dtype="moment", zero=1, source="runtime.optim"),
    ),
    saving=SAVING,
    loss={"cross_entropy": EAGER_LOSS, "fused": FUSED_LOSS, "chunked": CHUNKED_LOSS},
    shards_over_cp=False,
    context=Context(device=600 * MIB, communicator=64 * MIB),
    allocator=Allocator(activations=0.05, fixed=32 * MIB),
)

assert all(line.alive is Alive.ALWAYS for line in STACK.state)
