"""Megatron-Core with Transformer Engine: fp32 main gradients, fused norms and SwiGLU, distributed optimizer."""

from __future__ import annotations

from loadmaster.describe.op import OpKind
from loadmaster.describe.stack import Allocator, Context, Kept, LossTensor, Stack, StateLine
from loadmaster.describe.stacks.saving import CHUNKED_LOSS, FUSED, FUSED_LOSS
from loadmaster.units import MIB

BUFFER = "NVIDIA/Megatron-LM megatron/core/distributed/param_and_grad_buffer.py"
OPTIMIZER = "NVIDIA/Megatron-LM megatron/core/optimizer/distrib_optimizer.py"

# vocab_parallel_cross_entropy of logits.float(): the maximum is subtracted, the exponential taken and divided in
# place, and the gradient is written over that softmax before it is cast back
NATIVE_LOSS = (
    LossTensor(name="logits", dtype="compute", backward=False),
    LossTensor(name="softmax", dtype="fp32"),
    LossTensor(name="gradient", dtype="compute", forward=False, head=True),
)

# fused_vocab_parallel_cross_entropy: the compiled functions write the fp32 cast and the exponential apart
NATIVE_FUSED_LOSS = (
    LossTensor(name="logits", dtype="compute", backward=False),
    LossTensor(name="float", dtype="fp32", backward=False),
    LossTensor(name="softmax", dtype="fp32"),
    LossTensor(name="gradient", dtype="compute", forward=False, head=True),
)

STACK = Stack(
    name="megatron",
    title="Megatron-Core + Transformer Engine",
    precisions={"bf16-mixed": "bf16-master", "fp16-mixed": "fp16-master"},
    state=(
        StateLine(term="parameters", dtype="param", zero=3, source=BUFFER),
        StateLine(term="gradients", dtype="grad", zero=2, source=BUFFER),
        StateLine(term="optimizer/master", dtype="master", zero=1, source=OPTIMIZER),
        StateLine(term="optimizer/exp_avg", dtype="moment", zero=1, source=OPTIMIZER),
        StateLine(term="optimizer/exp_avg_sq", dtype="moment", zero=1, source=OPTIMIZER),
    ),
    # the router's weights multiply the experts' activation, inside its kernel: the combination keeps nothing
    saving={**FUSED, (OpKind.COMBINE, ""): Kept()},
    copies_views=True,
    fused=((OpKind.ACTIVATION, OpKind.MULTIPLY),),
    # fused: --cross-entropy-fusion-impl te; fused_native: native
    loss={
        "cross_entropy": NATIVE_LOSS,
        "fused": FUSED_LOSS,
        "fused_native": NATIVE_FUSED_LOSS,
        "chunked": CHUNKED_LOSS,
    },
    padded_vocab=128,
    head_streams=2,
    workspace=(4 * MIB, 32 * MIB),  # transformer_engine/pytorch/module/base.py: get_cublas_workspace_size_bytes
    scratch_gradients=True,
    context=Context(device=600 * MIB, communicator=64 * MIB),
    allocator=Allocator(state=0.02, activations=0.1, fixed=256 * MIB, sigma=0.05, sigma_allocated=0.028),
    overlaps_pipeline_send=True,
    sources=(BUFFER, OPTIMIZER, "NVIDIA/TransformerEngine transformer_engine/pytorch/module/base.py"),
)
