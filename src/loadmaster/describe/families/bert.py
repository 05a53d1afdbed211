"""BERT: an encoder with norms after each branch and a masked-token head tied to the embedding."""

from __future__ import annotations

from loadmaster.describe.families.classic import attend, layer_norm, plain_mlp, separate_qkv, whole_heads
from loadmaster.describe.families.fields import Fields
from loadmaster.describe.families.flow import Flow
from loadmaster.describe.families.stem import in_runs, position_table, table, token_embedding, token_loss
from loadmaster.describe.model import Block, Model
from loadmaster.describe.op import Op, OpKind, Split, Weight

__all__ = ["bert"]


def bert(fields: Fields, *, name: str, model_type: str, with_head: bool) -> Model:
    """BertForMaskedLM, or BertModel with its pooler."""
    if fields.flag("add_cross_attention", False):
        fields.refuse("add_cross_attention", True, "is not written out here", "describe the encoder alone")
    base = "bert." if with_head else ""
    hidden, vocab_size = fields.count("hidden_size"), fields.count("vocab_size")
    return Model(
        name=name, family=model_type, hidden_size=hidden, vocab_size=vocab_size, embedding=_embedding(fields, base),
        blocks=in_runs([_block(fields, f"{base}encoder.layer.{{}}.")] * fields.layers()),
        head=_masked_head(fields, base) if with_head else _pooler(fields),
        max_seq_len=fields.count("max_position_embeddings", 512),
    )  # fmt: skip


def _embedding(fields: Fields, base: str) -> Block:
    hidden = fields.count("hidden_size")
    flow = Flow("embedding", f"{base}embeddings.", width=None)
    x = token_embedding(flow, "word_embeddings.weight", vocab_size=fields.count("vocab_size"), width=hidden)
    types = table("token_type_embeddings.weight", fields.count("type_vocab_size", 2), hidden)
    flow.value("types", hidden)
    flow.op("types", OpKind.EMBEDDING, ("input_ids",), ("types",), weights=(types,))
    x = flow.add("types.sum", x, "types")
    x = position_table(flow, x, "position_embeddings.weight", rows=fields.count("max_position_embeddings", 512))
    x = layer_norm(flow, "embedding_norm", x, "LayerNorm")
    return flow.done(flow.dropout("tokens.dropout", x, fields.rate("hidden_dropout_prob", 0.1)), input="input_ids")


def _block(fields: Fields, prefix: str) -> Block:
    hidden, rate = fields.count("hidden_size"), fields.rate("hidden_dropout_prob", 0.1)
    core = whole_heads(
        fields, dropout=fields.rate("attention_probs_dropout_prob", 0.1), causal=fields.flag("is_decoder", False)
    )
    flow = Flow("encoder", prefix, width=hidden)
    names = ("attention.self.query", "attention.self.key", "attention.self.value")
    qkv = separate_qkv(flow, "input", core, weights=names, bias=(True, True, True), width=hidden)
    y = attend(flow, qkv, core, weight="attention.output.dense", width=hidden)
    x = flow.add("attention.residual", flow.dropout("attention.dropout", y, rate), "input")
    x = layer_norm(flow, "attention_norm", x, "attention.output.LayerNorm")
    y = plain_mlp(
        flow, x, width=hidden, inner=fields.count("intermediate_size"), up="intermediate.dense", down="output.dense",
        activation=fields.text("hidden_act", "gelu"),
    )  # fmt: skip
    y = flow.add("mlp.residual", flow.dropout("mlp.dropout", y, rate), x)
    return flow.done(layer_norm(flow, "mlp_norm", y, "output.LayerNorm"))


def _masked_head(fields: Fields, base: str) -> Block:
    """transform, then the embedding's matrix with a bias of its own."""
    hidden, vocab_size = fields.count("hidden_size"), fields.count("vocab_size")
    tied = fields.flag("tie_word_embeddings", True)
    flow = Flow("head", "", width=hidden)
    x = flow.linear(
        "transform", "input", weight="cls.predictions.transform.dense", d_in=hidden, d_out=hidden, bias=True
    )
    x = flow.pointwise("transform.activation", OpKind.ACTIVATION, x, function=fields.text("hidden_act", "gelu"))
    x = layer_norm(flow, "transform_norm", x, "cls.predictions.transform.LayerNorm")
    flow.value("logits", vocab_size, split=Split.TP)
    bias = Weight(name="cls.predictions.bias", shape=(vocab_size,), split=Split.TP)
    weights = (
        bias,
        Weight(
            name="cls.predictions.decoder.weight", shape=(vocab_size, hidden), split=Split.TP, multiplies=True,
            tied_to=f"{base}embeddings.word_embeddings.weight" if tied else None,
        ),
        Weight(
            name="cls.predictions.decoder.bias", shape=(vocab_size,), split=Split.TP,
            tied_to=bias.name if tied else None,
        ),
    )  # fmt: skip
    flow.ops.append(Op(name="logits", kind=OpKind.MATMUL, inputs=(x,), outputs=("logits",), weights=weights))
    return flow.done(token_loss(flow, "logits"))


def _pooler(fields: Fields) -> Block:
    hidden = fields.count("hidden_size")
    flow = Flow("head", "", width=hidden)
    flow.value("first", hidden, seq_power=0)
    flow.op("first", OpKind.POOL, ("input",), ("first",), function="first")
    x = flow.linear("pooler", "first", weight="pooler.dense", d_in=hidden, d_out=hidden, bias=True)
    return flow.done(flow.pointwise("pooler.activation", OpKind.ACTIVATION, x, function="tanh"))
