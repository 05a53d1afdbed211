"""Composer with llm-foundry: FSDP with fp32 parameters and bf16 compute, flash attention, low-precision layer norm."""

from __future__ import annotations

from dataclasses import replace

from loadmaster.describe.stacks.fsdp2 import STACK as FSDP2
from loadmaster.describe.stacks.saving import FUSED

FOUNDRY = "mosaicml/llm-foundry scripts/train/benchmarking"

STACK = replace(
    FSDP2,
    name="composer",
    title="Composer / llm-foundry (MPT, FSDP)",
    saving=FUSED,
    retains_unsharded=True,
    sources=(FOUNDRY,),
)
