"""Megatron-DeepSpeed: Megatron's first kernels with DeepSpeed's fp16 optimizer (BLOOM's pre-runs, vTrain's rows)."""

from __future__ import annotations

from loadmaster.describe.stack import Alive, Allocator, Context, LossTensor, Stack, StateLine
from loadmaster.describe.stacks.saving import CHUNKED_LOSS, EAGER, FUSED_LOSS
from loadmaster.units import MIB

SOURCE = "deepspeedai/DeepSpeed deepspeed/runtime/zero/stage_1_and_2.py"

# vocab_parallel_cross_entropy before the in-place subtraction: the fp32 cast and the shifted copy both exist
FIRST_LOSS = (
    LossTensor(name="logits", dtype="compute"),
    LossTensor(name="float", dtype="fp32", backward=False),
    LossTensor(name="softmax", dtype="fp32"),
    LossTensor(name="gradient", dtype="compute", forward=False, head=True),
)

STACK = Stack(
    name="megatron-deepspeed",
    title="Megatron-DeepSpeed, fp16 with ZeRO-1",
    precisions={"fp16-mixed": "fp16-master", "bf16-mixed": "bf16-master"},
    state=(
        StateLine(term="parameters", dtype="param", zero=3, source=SOURCE),
        StateLine(term="gradients", dtype="grad", zero=2, source=SOURCE),
        StateLine(term="optimizer/master", dtype="master", zero=1, source=SOURCE),
        StateLine(term="optimizer/exp_avg", dtype="moment", zero=1, source=SOURCE),
        StateLine(term="optimizer/exp_avg_sq", dtype="moment", zero=1, source=SOURCE),
        # the fp32 gradients of the partition, made for the update
        StateLine(term="optimizer/temporaries", dtype="fp32", alive=Alive.STEP, zero=1, source=SOURCE),
        # without the pipeline engine, the half-precision gradients flattened once more
        StateLine(term="gradients/flat", dtype="grad", alive=Alive.STEP, when="unpiped", source=SOURCE),
    ),
    saving=EAGER,
    attention="eager",
    loss={"cross_entropy": FIRST_LOSS, "fused": FUSED_LOSS, "chunked": CHUNKED_LOSS},
    padded_vocab=128,
    shards_over_cp=False,
    context=Context(device=600 * MIB, communicator=96 * MIB),
    buckets=(2, 500_000_000),  # reduce_bucket_size and allgather_bucket_size, DeepSpeed's defaults
    allocator=Allocator(state=0.08, activations=0.0, checkpoints=0.44, step=1.0, fixed=1100 * MIB, sigma=0.052),
    overlaps_gradient_reduction=False,
    overlaps_parameter_gather=False,
    sources=(SOURCE, "bigscience-workshop/Megatron-DeepSpeed megatron/model/transformer.py"),
)
