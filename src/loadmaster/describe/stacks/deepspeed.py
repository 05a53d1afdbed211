"""DeepSpeed's bf16/fp16 engine around eager modules: half-precision gradients, fp32 masters, ZeRO 0-3."""

from __future__ import annotations

from loadmaster.describe.stack import Allocator, Context, Stack, StateLine
from loadmaster.describe.stacks.saving import CHUNKED_LOSS, EAGER, EAGER_LOSS, FUSED_LOSS
from loadmaster.units import MIB

ZERO = "deepspeedai/DeepSpeed deepspeed/runtime/zero"

STACK = Stack(
    name="deepspeed",
    title="DeepSpeed ZeRO",
    precisions={"fp16-mixed": "fp16-master", "bf16-mixed": "bf16-deepspeed", "bf16-master": "bf16-deepspeed"},
    state=(
        StateLine(term="parameters", dtype="param", zero=3, source=ZERO),
        StateLine(term="gradients", dtype="grad", zero=2, source=ZERO),
        StateLine(term="optimizer/master", dtype="master", zero=1, source=ZERO),
        StateLine(term="optimizer/exp_avg", dtype="moment", zero=1, source=ZERO),
        StateLine(term="optimizer/exp_avg_sq", dtype="moment", zero=1, source=ZERO),
    ),
    saving=EAGER,
    loss={"cross_entropy": EAGER_LOSS, "fused": FUSED_LOSS, "chunked": CHUNKED_LOSS},
    shards_over_cp=False,
    live_parameters=1_000_000_000,  # stage3_max_live_parameters
    buckets=(2, 500_000_000),  # reduce_bucket_size, twice under overlap_comm
    context=Context(device=600 * MIB, communicator=64 * MIB),
    allocator=Allocator(activations=0.0, fixed=3072 * MIB, sigma=0.08),
    sources=(ZERO,),
)
