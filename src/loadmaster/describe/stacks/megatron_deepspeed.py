"""Megatron-DeepSpeed: Megatron's first kernels with DeepSpeed's fp16 optimizer (BLOOM's pre-runs, vTrain's rows)."""

from __future__ import annotations

from loadmaster.describe.stack import Allocator, Context, Stack, StateLine
from loadmaster.describe.stacks.megatron import NATIVE_LOSS
from loadmaster.describe.stacks.saving import CHUNKED_LOSS, EAGER, FUSED_LOSS
from loadmaster.units import MIB

SOURCE = "deepspeedai/DeepSpeed deepspeed/runtime/zero/stage_1_and_2.py"

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
    ),
    saving=EAGER,
    attention="eager",
    loss={"cross_entropy": NATIVE_LOSS, "fused": FUSED_LOSS, "chunked": CHUNKED_LOSS},
    padded_vocab=128,
    shards_over_cp=False,
    context=Context(device=600 * MIB, communicator=96 * MIB),
    allocator=Allocator(activations=0.1, fixed=64 * MIB, sigma=0.06),
    overlaps_gradient_reduction=False,
    overlaps_parameter_gather=False,
    sources=(SOURCE, "bigscience-workshop/Megatron-DeepSpeed megatron/model/transformer.py"),
)
