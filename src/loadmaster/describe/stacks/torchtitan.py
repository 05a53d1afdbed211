"""torchtitan: fully_shard with fp32 parameters and bf16 compute, sharded over dp and cp together."""

from __future__ import annotations

from dataclasses import replace

from loadmaster.describe.stack import Allocator
from loadmaster.describe.stacks.fsdp2 import STACK as FSDP2
from loadmaster.describe.stacks.saving import FUSED
from loadmaster.units import MIB

TITAN = "pytorch/torchtitan torchtitan/distributed/fsdp.py"

STACK = replace(
    FSDP2,
    name="torchtitan",
    title="torchtitan: fully_shard, fp32 parameters, bf16 compute, compiled blocks",
    saving=FUSED,  # torch.compile fuses the norm's chain into one kernel that keeps its input
    compiled=True,
    splits_vocab=True,
    splits_embedding=True,
    selective_matmuls=True,
    allocator=Allocator(activations=0.01, streams=7, fixed=64 * MIB, sigma=0.06, sigma_allocated=0.06),
    sources=(TITAN, "pytorch/torchtitan torchtitan/distributed/activation_checkpoint.py"),
)
