"""What the loss makes of the logits: forward, backward, and the backward of the head's product."""

from __future__ import annotations

from functools import lru_cache

from loadmaster.describe.op import OpKind
from loadmaster.describe.precision import BYTES, Precision
from loadmaster.describe.stack import Stack
from loadmaster.laws.numbers import Number, ceil_div, greater, where
from loadmaster.laws.placement import Placement
from loadmaster.laws.run import Run
from loadmaster.laws.state import block_params

__all__ = ["loss_bytes", "loss_events", "loss_tensors"]

Terms = dict[str, Number]


def loss_events(run: Run, placement: Placement) -> list[Terms]:
    """The loss (the worse of its two directions) and the head's backward; nothing without a head.

    ``logits = T * V / tp * bytes a logit``; the head's backward holds the logits' gradient, its weight's
    ``V h / tp`` and whole copies of the stream.
    """
    if not any(op.kind is OpKind.LOSS for op in run.model.head.ops):
        return [{}]
    loss = run.workload.loss
    whole = loss_bytes(run.stack, run.precision, loss)
    sharded = loss_bytes(run.stack, run.precision, loss, zero=3)
    if whole != sharded:
        forward, backward, head = (where(run.layout.zero >= 3, b, a) for a, b in zip(whole, sharded, strict=True))
    else:
        forward, backward, head = whole
    elements = run.tokens * run.padded_vocab
    if run.stack.splits_vocab:
        elements = ceil_div(elements, run.layout.tp)
    elements = elements * placement.head
    stream = run.tokens * run.model.hidden_size * run.compute_bytes * placement.head
    matrix: Number = block_params(run, run.model.head, with_tied=True).total * run.compute_bytes * placement.head
    if run.workload.frozen != "none":
        matrix = 0  # a frozen head's weight takes no gradient
    return [
        {"logits": elements * greater(forward, backward), "transient": stream * run.stack.head_streams},
        {"logits": elements * head, "transient": stream * max(1, run.stack.head_streams) + matrix},
    ]


def loss_tensors(run: Run) -> dict[str, Number]:
    """Bytes of each tensor as large as the logits on a rank that holds the head, by name, whenever it lives."""
    elements = run.tokens * run.padded_vocab
    if run.stack.splits_vocab:
        elements = ceil_div(elements, run.layout.tp)
    low = run.compute_bytes < 4
    return {
        t.name: elements * BYTES[run.precision.compute if t.dtype == "compute" else t.dtype]
        for t in run.stack.loss_tensors(run.workload.loss)
        if low or not t.low_only
    }


@lru_cache(maxsize=256)
def loss_bytes(stack: Stack, precision: Precision, loss: str, zero: int = 0) -> tuple[int, int, int]:
    """Bytes a logit in the loss's forward, in its backward, in the head's backward.

    >>> loss_bytes(Stack.named("torchtitan"), Precision.named("bf16-mixed"), "cross_entropy")
    (10, 14, 2)
    """
    low = BYTES[precision.compute] < 4
    sums = [0, 0, 0]
    for tensor in stack.loss_tensors(loss):
        if (tensor.low_only and not low) or zero < tensor.zero:
            continue
        size = BYTES[precision.compute if tensor.dtype == "compute" else tensor.dtype]
        for k, alive in enumerate((tensor.forward, tensor.backward, tensor.head)):
            sums[k] += size * alive
    return sums[0], sums[1], sums[2]
