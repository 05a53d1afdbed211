"""KempnerForge: fully_shard around a model cast to bf16; no fp32 master, whole fp32 gradients over a window."""

from __future__ import annotations

from dataclasses import replace

from loadmaster.describe.stack import Allocator
from loadmaster.describe.stacks.fsdp2 import STACK as FSDP2
from loadmaster.describe.stacks.saving import CHUNKED_LOSS, COMPILED_LOSS, FUSED, FUSED_LOSS
from loadmaster.units import MIB

STACK = replace(
    FSDP2,
    name="kempnerforge",
    title="KempnerForge: fully_shard, bf16 weights and moments, compiled",
    precisions={"bf16-mixed": "bf16-reduce-fp32"},
    saving=FUSED,
    loss={"cross_entropy": COMPILED_LOSS, "fused": FUSED_LOSS, "chunked": CHUNKED_LOSS},
    root_gathered=False,
    compiled=True,
    allocator=Allocator(activations=0.05, fixed=64 * MIB, sigma=0.09, sigma_allocated=0.09),
    sources=(
        "KempnerInstitute/KempnerForge kempnerforge/distributed/parallel.py",
        "KempnerInstitute/KempnerForge kempnerforge/training/grad.py, training/loss.py",
    ),
)
