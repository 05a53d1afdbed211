"""PyTorch's fully_shard around a bf16 model (KempnerForge): no fp32 master, whole fp32 gradients over a window."""

from __future__ import annotations

from loadmaster.describe.stack import Allocator, Context, Stack, StateLine
from loadmaster.describe.stacks.saving import CHUNKED_LOSS, EAGER, EAGER_LOSS, FUSED_LOSS
from loadmaster.units import MIB

FSDP = "pytorch/pytorch torch/distributed/fsdp/_fully_shard"

STACK = Stack(
    name="fsdp2",
    title="PyTorch fully_shard",
    state=(
        StateLine(term="parameters", dtype="param", zero=3, source=FSDP),
        StateLine(term="gradients", dtype="grad", zero=2, source=FSDP),
        StateLine(term="optimizer/master", dtype="master", zero=1, source=FSDP),
        StateLine(term="optimizer/exp_avg", dtype="moment", zero=1, source="torch.optim.AdamW"),
        StateLine(term="optimizer/exp_avg_sq", dtype="moment", zero=1, source="torch.optim.AdamW"),
    ),
    saving=EAGER,
    loss={"cross_entropy": EAGER_LOSS, "fused": FUSED_LOSS, "chunked": CHUNKED_LOSS},
    retains_unsharded=True,
    reshards_in_pipeline=False,  # reshard_after_forward is off by default where there is a pipeline
    splits_vocab=False,
    splits_embedding=False,  # the token table is replicated over tp, the head is not
    context=Context(device=600 * MIB, communicator=64 * MIB),
    allocator=Allocator(activations=0.06, fixed=64 * MIB),
    sources=(FSDP, "KempnerInstitute/KempnerForge kempnerforge/distributed/parallel.py"),
)
