"""What ops keep for their backward, by implementation: the rules several stacks share.

`EAGER` is PyTorch's autograd running one kernel an op; `FUSED` is Transformer Engine or Triton kernels.
"""

from __future__ import annotations

from loadmaster.describe.op import OpKind
from loadmaster.describe.stack import Extra, Kept, LossTensor, Size

__all__ = ["CHUNKED_LOSS", "COMPILED_LOSS", "EAGER", "EAGER_LOSS", "FUSED", "FUSED_LOSS", "LSE", "ONE_INPUT"]

ONE_INPUT = Kept(inputs=(0,))
NOTHING = Kept()
STATISTIC = Extra(name="rstd", size=Size.TOKEN)
MEAN = Extra(name="mean", size=Size.TOKEN)
LSE = Extra(name="logsumexp", size=Size.HEADS)  # fp32, one a head and token
FP32_COPY = Extra(name="fp32_copy", size=Size.INPUT, low_only=True)
NORMALISED = Extra(name="normalised", size=Size.OUTPUT, dtype="compute")

FLASH_ATTENTION = Kept(inputs=(0, 1, 2), outputs=(0,), extra=(LSE,))
# context parallelism by all-to-all keeps the kernel's output, and the projection keeps it again once it is sent back
FLASH_ALL_TO_ALL = Kept(
    inputs=(0, 1, 2),
    outputs=(0,),
    extra=(LSE, Extra(name="before_all_to_all", size=Size.OUTPUT, dtype="compute", context_only=True)),
)
# softmax probabilities in the compute dtype; scaled scores feed the softmax, which keeps its output only
EAGER_ATTENTION = Kept(inputs=(0, 1, 2), extra=(Extra(name="probabilities", size=Size.SCORES, dtype="compute"),))
# dropout on the probabilities keeps its mask and its output
EAGER_ATTENTION_DROPOUT = Kept(
    inputs=(0, 1, 2),
    extra=(
        Extra(name="probabilities", size=Size.SCORES, dtype="compute"),
        Extra(name="mask", size=Size.SCORES, dtype="bool"),
        Extra(name="dropped", size=Size.SCORES, dtype="compute"),
    ),
)

_COMMON = {
    (OpKind.MATMUL, ""): ONE_INPUT,
    (OpKind.CONV, ""): ONE_INPUT,
    (OpKind.EMBEDDING, ""): ONE_INPUT,  # the token ids
    (OpKind.POSITION, ""): NOTHING,
    (OpKind.ATTENTION, "flash"): FLASH_ATTENTION,
    (OpKind.ATTENTION, "flash_dropout"): FLASH_ATTENTION,  # the mask is made again from the generator's state
    (OpKind.ATTENTION, "flash_all_to_all"): FLASH_ALL_TO_ALL,
    (OpKind.ATTENTION, "eager"): EAGER_ATTENTION,
    (OpKind.ATTENTION, "eager_dropout"): EAGER_ATTENTION_DROPOUT,
    (OpKind.ACTIVATION, ""): ONE_INPUT,
    (OpKind.MULTIPLY, ""): Kept(inputs=(0, 1)),
    (OpKind.ADD, ""): NOTHING,
    (OpKind.SCALE, ""): NOTHING,
    (OpKind.SOFTCAP, ""): Kept(outputs=(0,)),
    (OpKind.DROPOUT, ""): Kept(extra=(Extra(name="mask", size=Size.INPUT, dtype="bool"),)),
    (OpKind.ROPE, ""): NOTHING,  # linear in its input: only the shared cos and sin tables
    (OpKind.ROUTER, ""): Kept(inputs=(0,), outputs=(0,)),
    (OpKind.DISPATCH, ""): NOTHING,
    (OpKind.COMBINE, ""): Kept(inputs=(0,)),
    (OpKind.POOL, ""): NOTHING,
}

# One kernel an op, as transformers writes its modules: an RMSNorm casts to fp32 (a copy that the power and the
# product keep), keeps the normalised copy for the product with its weight, and its output is the next linear's input.
EAGER = {
    **_COMMON,
    (OpKind.NORM, ""): Kept(inputs=(0,), extra=(STATISTIC, MEAN)),
    (OpKind.NORM, "rms"): Kept(inputs=(0,), extra=(FP32_COPY, STATISTIC, NORMALISED)),
    (OpKind.NORM, "rms_unit"): Kept(inputs=(0,), extra=(FP32_COPY, STATISTIC, NORMALISED)),
    (OpKind.NORM, "qk"): Kept(inputs=(0,), extra=(FP32_COPY, STATISTIC, NORMALISED)),
}

# A norm keeps its input and one statistic a token; the rest follows from the op's algebra.
FUSED = {
    **_COMMON,
    (OpKind.NORM, ""): Kept(inputs=(0,), extra=(STATISTIC, MEAN)),
    (OpKind.NORM, "rms"): Kept(inputs=(0,), extra=(STATISTIC,)),
    (OpKind.NORM, "rms_unit"): Kept(inputs=(0,), extra=(STATISTIC,)),
    (OpKind.NORM, "qk"): Kept(inputs=(0,), extra=(STATISTIC,)),
}

# cross_entropy(logits.float()): 2 + 4 + 4 bytes an element going forward, 2 + 4 + 4 + 4 coming back in bf16
EAGER_LOSS = (
    LossTensor(name="logits", dtype="compute"),
    LossTensor(name="float", dtype="fp32", low_only=True, backward=False),
    LossTensor(name="log_softmax", dtype="fp32"),
    LossTensor(name="gradient of log_softmax", dtype="fp32", forward=False),
    LossTensor(name="gradient of float", dtype="fp32", forward=False),
    LossTensor(name="gradient", dtype="compute", forward=False, backward=False, head=True),
)
# the cast is fused into both directions: the logits, their log-softmax in fp32 and the gradient in the compute dtype
COMPILED_LOSS = (
    LossTensor(name="logits", dtype="compute"),
    LossTensor(name="log_softmax", dtype="fp32"),
    LossTensor(name="gradient", dtype="compute", forward=False, head=True),
)
# one kernel writes the gradient over the logits
FUSED_LOSS = (LossTensor(name="logits", dtype="compute", head=True),)
CHUNKED_LOSS: tuple[LossTensor, ...] = ()  # neither logits nor gradient exist whole
