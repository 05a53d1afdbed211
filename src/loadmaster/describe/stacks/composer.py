"""Composer with llm-foundry: FSDP with fp32 parameters and bf16 compute, flash attention, low-precision layer norm."""

from __future__ import annotations

from dataclasses import replace

from loadmaster.describe.stacks.fsdp2 import STACK as FSDP2
from loadmaster.describe.stacks.saving import CHUNKED_LOSS, FUSED, FUSED_LOSS

FOUNDRY = "mosaicml/llm-foundry scripts/train/benchmarking"

STACK = replace(
    FSDP2,
    name="composer",
    title="Composer / llm-foundry (MPT, FSDP)",
    saving=FUSED,
    retains_unsharded=False,  # every micro-batch's backward reduces and scatters
    # flash-attn's cross-entropy, which writes the gradient over the logits, is the default loss
    loss={"cross_entropy": FUSED_LOSS, "fused": FUSED_LOSS, "chunked": CHUNKED_LOSS},
    sources=(FOUNDRY,),
)
