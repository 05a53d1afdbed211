"""Loadmaster's own runtime: transformers' modules run eagerly with PyTorch's SDPA, flat gradient buckets, ZeRO 0-3.

This table is the one place where the saved-tensor rules of our runtime are written; real traces hold it to the byte.
"""

from __future__ import annotations

from loadmaster.describe.op import OpKind
from loadmaster.describe.stack import Alive, Allocator, Context, Extra, Kept, Size, Stack, StateLine
from loadmaster.describe.stacks.saving import CHUNKED_LOSS, EAGER, EAGER_LOSS, FUSED_LOSS, LSE, STATISTIC
from loadmaster.units import MIB

_NORMALISED = Extra(name="normalised", size=Size.OUTPUT, dtype="input")
_NORMALISED_FP32 = Extra(name="normalised", size=Size.OUTPUT)
# weight * hidden.to(input's dtype): an fp32 copy of the input and the statistic are kept, and the normalised tensor
_RMS = Kept(upcast=(0,), extra=(STATISTIC, _NORMALISED))
# (1 + weight) in fp32: one more tensor as small as the weight
_RMS_UNIT = Kept(
    upcast=(0,), extra=(STATISTIC, _NORMALISED_FP32, Extra(name="unit_weight", size=Size.WEIGHT))
)  # fmt: skip
# the product with the weight is made in fp32 as well (OLMo 2)
_RMS_FP32 = Kept(upcast=(0,), extra=(STATISTIC, _NORMALISED_FP32))
# written out in Python, 0.5 * x * (1 + tanh(...)): three tensors beside the input
_GELU_BY_HAND = Kept(
    inputs=(0,), extra=tuple(Extra(name=n, size=Size.INPUT, dtype="input") for n in ("half", "tanh", "one_plus_tanh"))
)  # fmt: skip
# q was made by a concatenation, so that heads come before tokens: the output is copied back for the next product
_FLASH_COPIED = Kept(
    inputs=(0, 1, 2), outputs=(0,), extra=(LSE, Extra(name="contiguous", size=Size.OUTPUT, dtype="compute"))
)  # fmt: skip
_STATISTICS = tuple(Extra(name=n, size=Size.TOKEN, dtype="param") for n in ("rstd", "mean"))

SAVING = {
    **EAGER,
    (OpKind.NORM, ""): Kept(inputs=(0,), extra=_STATISTICS),
    (OpKind.NORM, "rms"): _RMS,
    (OpKind.NORM, "qk"): _RMS,
    (OpKind.NORM, "rms_unit"): _RMS_UNIT,
    (OpKind.NORM, "rms_fp32"): _RMS_FP32,
    (OpKind.ACTIVATION, "gelu_new"): _GELU_BY_HAND,
    (OpKind.ACTIVATION, "relu"): Kept(outputs=(0,)),
    (OpKind.ATTENTION, "flash_copied"): _FLASH_COPIED,
}

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
    autocast=True,
    borrows_gradients=True,
    context=Context(device=600 * MIB, communicator=64 * MIB),
    allocator=Allocator(activations=0.05, fixed=32 * MIB),
)

assert all(line.alive is Alive.ALWAYS for line in STACK.state)
