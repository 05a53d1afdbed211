"""nanotron (the Ultrascale sweep): whole fp32 gradient buffer, half-precision gradients that come and go, ZeRO-1."""

from __future__ import annotations

from loadmaster.describe.stack import Alive, Allocator, Context, Deferral, LossTensor, Stack, StateLine
from loadmaster.describe.stacks.saving import CHUNKED_LOSS, FUSED, FUSED_LOSS
from loadmaster.units import MIB

ACCUMULATOR = "huggingface/nanotron src/nanotron/optim/gradient_accumulator.py"
TRAINER = "huggingface/nanotron src/nanotron/trainer.py"
GATHER = "huggingface/nanotron src/nanotron/distributed.py: all_gather_coalesced"

# sharded_cross_entropy: fp32 cast, logits - max, exp and division in place; the gradient is written over the softmax
SHARDED_LOSS = (
    LossTensor(name="logits", dtype="compute"),
    LossTensor(name="float", dtype="fp32", backward=False),
    LossTensor(name="softmax", dtype="fp32"),
    LossTensor(name="gradient", dtype="compute", forward=False, head=True),
)

STACK = Stack(
    name="nanotron",
    title="nanotron, fp32 gradient accumulation",
    precisions={"bf16-mixed": "bf16-master"},
    state=(
        StateLine(term="parameters", dtype="param", source="huggingface/nanotron src/nanotron/models/base.py"),
        StateLine(term="gradients", dtype="grad", source=ACCUMULATOR),
        StateLine(term="optimizer/master", dtype="master", zero=1, source=ACCUMULATOR),
        StateLine(term="optimizer/exp_avg", dtype="moment", zero=1, source="torch.optim.AdamW(fused=True)"),
        StateLine(term="optimizer/exp_avg_sq", dtype="moment", zero=1, source="torch.optim.AdamW(fused=True)"),
        StateLine(term="buffers/buckets", dtype="compute", when="zero0+replicas", source=TRAINER),
        StateLine(term="gradients/half", dtype="compute", alive=Alive.BACKWARD, source=ACCUMULATOR),
        StateLine(term="buffers/all_gather", dtype="compute", alive=Alive.STEP, when="zero1", source=GATHER),
        StateLine(term="buffers/all_gather_flat", dtype="compute", alive=Alive.STEP, when="zero1", source=GATHER),
    ),
    saving=FUSED,
    loss={"cross_entropy": SHARDED_LOSS, "fused": FUSED_LOSS, "chunked": CHUNKED_LOSS},
    placement="cost",
    shards_over_cp=False,
    context=Context(device=600 * MIB, communicator=64 * MIB),
    allocator=Allocator(
        activations=0.12,
        odd_sizes=0.07,
        step=0.5,
        streams=3,
        deferral=Deferral(
            copies=(
                (1, (10, 18, 21, 22, 23)),
                (2, (12, 3, 0, 0, 0)),
                (4, (22, 15, 13, 13, 0)),
                (8, (16, 19, 22, 20, 0)),
            ),
            single=7.5,
        ),
        fixed=150 * MIB,
        sigma=0.09,
    ),
    overlaps_gradient_reduction=False,
    overlaps_parameter_gather=False,
    sources=(ACCUMULATOR, TRAINER, GATHER),
)
