"""What stands before and after the blocks: token embedding, final norm, output head, loss."""

from __future__ import annotations

from dataclasses import replace

from loadmaster.describe.families.flow import Flow
from loadmaster.describe.model import Block
from loadmaster.describe.op import OpKind, Split, ValueType, Weight

__all__ = ["in_runs", "language_head", "table", "token_embedding"]


def table(name: str, rows: int, width: int, *, vocabulary: bool = False, trainable: bool = True) -> Weight:
    """An embedding table; a vocabulary's rows are divided by tp."""
    return Weight(
        name=name, shape=(rows, width), split=Split.TP if vocabulary else Split.NONE, trainable=trainable,
    )  # fmt: skip


def token_embedding(flow: Flow, weight: str, *, vocab_size: int, width: int) -> str:
    """Look up ``input_ids``."""
    flow.value("input_ids", 1, type=ValueType.INT64)
    flow.value("tokens", width, split=Split.SEQUENCE)
    ops = (table(weight, vocab_size, width, vocabulary=True),)
    return flow.op("tokens", OpKind.EMBEDDING, ("input_ids",), ("tokens",), weights=ops)


def rope_tables(flow: Flow, width: int) -> None:
    """Cosines and sines of all positions, once for all layers (and for all samples)."""
    for name in ("cos", "sin"):
        flow.value(name, width, batch_power=0)
    flow.op("rope", OpKind.ROPE, (), ("cos", "sin"), function="table")


def language_head(
    flow: Flow, x: str, *, weight: str, width: int, vocab_size: int, tied_to: str | None, bias: bool = False,
    softcap: float | None = None, scale: bool = False,
) -> str:  # fmt: skip
    """logits = x W^T (scaled, soft-capped), then the mean cross-entropy over ``labels``."""
    logits = flow.linear(
        "logits", x, weight=weight, d_in=width, d_out=vocab_size, bias=bias, split="column", tied_to=tied_to
    )
    if scale:
        logits = flow.pointwise("logits.scale", OpKind.SCALE, logits)
    if softcap:
        logits = flow.pointwise("logits.softcap", OpKind.SOFTCAP, logits, function="tanh")
    flow.value("labels", 1, type=ValueType.INT64)
    flow.value("loss", 1, batch_power=0, seq_power=0, type=ValueType.FP32)
    return flow.op("loss", OpKind.LOSS, (logits, "labels"), ("loss",), function="cross_entropy")


def in_runs(blocks: list[Block]) -> tuple[tuple[Block, int], ...]:
    """One block a layer to (block, repeat): equal neighbours become one run, which knows where it starts."""
    runs: list[tuple[Block, int]] = []
    starts: list[int] = []
    for index, block in enumerate(blocks):
        if runs and runs[-1][0] is block:
            runs[-1] = (block, runs[-1][1] + 1)
        else:
            runs.append((block, 1))
            starts.append(index)
    return tuple((replace(b, first_index=i) if i else b, n) for (b, n), i in zip(runs, starts, strict=True))
