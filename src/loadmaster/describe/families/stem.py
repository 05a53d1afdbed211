"""What stands before and after the blocks of a language model: embedding, final norm, output head, loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

from loadmaster.describe.families.flow import Flow
from loadmaster.describe.model import Block, Model
from loadmaster.describe.op import OpKind, Split, ValueType, Weight

__all__ = ["Stem", "assemble", "in_runs", "language_head", "position_table", "table", "token_embedding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stem:
    """The parts of a model that are no blocks; names are below `base` in the state dict.

    Attributes:
        name, family: as `Model`'s.
        hidden: width of the stream; embedding_width: of the table where it differs (OPT's projections).
        base: prefix of the body in the state dict (``model.``, or empty for a bare body).
        with_head: has an output head and a loss; tied: the head is the embedding's matrix; head_bias: it has a bias.
        embed, final_norm, head: module names; no final norm where empty.
        norm, norm_bias, norm_affine: kind of the final norm and its weights.
        positions: name and rows of a learned position table.
        embedding_norm: name of a norm on the embedding (BLOOM).
        embedding_scale: embeddings are multiplied by a constant; embedding_dropout: their dropout rate.
        softcap: of the logits; logits_scale: logits are multiplied by a constant.
        rope_width: elements of a row of the rotary tables (0: none).
    """

    name: str
    family: str
    hidden: int
    vocab_size: int
    tied: bool
    embedding_width: int | None = None
    base: str = "model."
    with_head: bool = True
    head_bias: bool = False
    embed: str = "embed_tokens"
    final_norm: str = "norm"
    head: str = "lm_head"
    norm: str = "rms"
    norm_bias: bool = False
    norm_affine: bool = True
    positions: tuple[str, int] | None = None
    embedding_norm: str = ""
    embedding_scale: bool = False
    embedding_dropout: float = 0.0
    softcap: float | None = None
    logits_scale: bool = False
    rope_width: int = 0
    max_seq_len: int | None = None


def assemble(stem: Stem, blocks: list[Block]) -> Model:
    """Embedding, these blocks (one a layer), final norm and head."""
    return Model(
        name=stem.name, family=stem.family, hidden_size=stem.hidden, vocab_size=stem.vocab_size,
        embedding=_embedding(stem), blocks=in_runs(blocks), head=_head(stem), max_seq_len=stem.max_seq_len,
    )  # fmt: skip


def _embedding(stem: Stem) -> Block:
    flow = Flow("embedding", stem.base, width=None)
    width = stem.embedding_width or stem.hidden
    x = token_embedding(flow, f"{stem.embed}.weight", vocab_size=stem.vocab_size, width=width)
    if width != stem.hidden:
        x = flow.linear("project_in", x, weight="project_in", d_in=width, d_out=stem.hidden)
    if stem.embedding_scale:
        x = flow.pointwise("tokens.scale", OpKind.SCALE, x)
    if stem.embedding_norm:
        x = flow.norm("embedding_norm", x, weight=stem.embedding_norm, function="layer", bias=True)
    if stem.positions:
        x = position_table(flow, x, f"{stem.positions[0]}.weight", rows=stem.positions[1])
    x = flow.dropout("tokens.dropout", x, stem.embedding_dropout)
    if stem.rope_width:
        rope_tables(flow, stem.rope_width)
    return flow.done(x, input="input_ids")


def _head(stem: Stem) -> Block:
    flow = Flow("head", "", width=stem.hidden)
    x = "input"
    if stem.final_norm:
        x = flow.norm(
            "final_norm", x, weight=stem.base + stem.final_norm, function=stem.norm, bias=stem.norm_bias,
            affine=stem.norm_affine,
        )  # fmt: skip
    width = stem.embedding_width or stem.hidden
    if width != stem.hidden:
        x = flow.linear("project_out", x, weight=f"{stem.base}project_out", d_in=stem.hidden, d_out=width)
    if stem.with_head:
        x = language_head(
            flow, x, weight=stem.head, width=width, vocab_size=stem.vocab_size, softcap=stem.softcap,
            scale=stem.logits_scale, bias=stem.head_bias,
            tied_to=f"{stem.base}{stem.embed}.weight" if stem.tied else None,
        )  # fmt: skip
    return flow.done(x)


def table(name: str, rows: int, width: int, *, vocabulary: bool = False, trainable: bool = True) -> Weight:
    """An embedding table; a vocabulary's rows are divided by tp."""
    return Weight(name=name, shape=(rows, width), split=Split.TP if vocabulary else Split.NONE, trainable=trainable)


def token_embedding(flow: Flow, weight: str, *, vocab_size: int, width: int) -> str:
    """Look up ``input_ids``."""
    flow.value("input_ids", 1, type=ValueType.INT64)
    flow.value("tokens", width, split=Split.SEQUENCE)
    weights = (table(weight, vocab_size, width, vocabulary=True),)
    return flow.op("tokens", OpKind.EMBEDDING, ("input_ids",), ("tokens",), weights=weights)


def position_table(flow: Flow, x: str, weight: str, *, rows: int, trainable: bool = True) -> str:
    """x plus a row of a table for each position (the same for every sample)."""
    width = flow.values[x].width
    y = flow.value("positions", width, batch_power=0, seq_power=flow.values[x].seq_power)
    flow.op("positions", OpKind.POSITION, (), (y,), weights=(table(weight, rows, width, trainable=trainable),))
    return flow.add("tokens.sum", x, y)


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
    return token_loss(flow, logits)


def token_loss(flow: Flow, logits: str) -> str:
    """Cross-entropy of ``logits`` against one label a token (or a sample)."""
    v = flow.values[logits]
    flow.value("labels", 1, type=ValueType.INT64, batch_power=v.batch_power, seq_power=v.seq_power)
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
