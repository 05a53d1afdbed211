"""Hugging Face Trainer and accelerate: eager modules in the dtype they were loaded in, FSDP where asked."""

from __future__ import annotations

from loadmaster.describe.stack import Alive, Allocator, Context, LossTensor, Stack, StateLine
from loadmaster.describe.stacks.saving import CHUNKED_LOSS, EAGER, FUSED_LOSS
from loadmaster.units import MIB

TRAINER = "huggingface/transformers src/transformers/trainer.py"
DDP = "pytorch/pytorch torch/nn/parallel/distributed.py"
ADAMW = "pytorch/pytorch torch/optim/adamw.py: _multi_tensor_adamw"

# the model's own loss (to 4.45): logits.float(), a contiguous copy without the last position, log-softmax; the model's
# outputs are gone when backward makes the gradients. FSDP hands on one more copy of its output.
UPCAST_LOSS = (
    LossTensor(name="logits", dtype="compute", low_only=True, backward=False),
    LossTensor(name="float", dtype="fp32", backward=False),
    LossTensor(name="shifted", dtype="fp32"),
    LossTensor(name="log_softmax", dtype="fp32"),
    LossTensor(name="gradient", dtype="fp32", forward=False),
    LossTensor(name="output", dtype="compute", low_only=True, zero=3, backward=False),
    LossTensor(name="gradient of logits", dtype="compute", forward=False, backward=False, head=True),
)
# the same with a fused cross-entropy that writes the gradient over the shifted copy
UPCAST_FUSED_LOSS = (
    LossTensor(name="float", dtype="fp32"),
    LossTensor(name="shifted", dtype="fp32"),
    LossTensor(name="gradient of logits", dtype="compute", forward=False, backward=False, head=True),
)

STACK = Stack(
    name="accelerate",
    title="Hugging Face Trainer / accelerate",
    state=(
        StateLine(term="parameters", dtype="param", zero=3, source=TRAINER),
        StateLine(term="gradients", dtype="grad", zero=2, alive=Alive.LAZY, source=TRAINER),
        StateLine(term="optimizer/master", dtype="master", zero=1, source=TRAINER),
        StateLine(term="optimizer/exp_avg", dtype="moment", zero=1, source=ADAMW),
        StateLine(term="optimizer/exp_avg_sq", dtype="moment", zero=1, source=ADAMW),
        # without gradient_as_bucket_view, DistributedDataParallel's buckets hold every gradient once more
        StateLine(
            term="buffers/buckets", dtype="grad", when="zero0+replicas", source="torch/nn/parallel/distributed.py"
        ),
        # the square roots of all second moments at once
        StateLine(term="optimizer/temporaries", dtype="moment", alive=Alive.STEP, zero=1, source=ADAMW),
    ),
    saving=EAGER,
    loss={
        "cross_entropy": UPCAST_LOSS,
        "fused_native": UPCAST_FUSED_LOSS,
        "fused": FUSED_LOSS,
        "chunked": CHUNKED_LOSS,
    },
    gathered_layers=1,
    splits_vocab=False,
    splits_embedding=False,
    context=Context(device=600 * MIB, communicator=64 * MIB),
    allocator=Allocator(activations=0.06, fixed=64 * MIB, sigma=0.08, sigma_allocated=0.036),
    sources=(TRAINER, "huggingface/accelerate src/accelerate/accelerator.py", ADAMW),
)
