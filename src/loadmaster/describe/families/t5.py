"""T5: encoder and decoder with relative position biases; version 1.1 has gated MLPs and a head of its own.

Newer releases of transformers tie the head of version 1.1 again when they build it without weights; its published
checkpoints (``tie_word_embeddings: false``) hold a separate one, and so does this.
"""

from __future__ import annotations

from loadmaster.describe.families.classic import attend, separate_qkv
from loadmaster.describe.families.fields import Fields
from loadmaster.describe.families.flow import Flow
from loadmaster.describe.families.stem import language_head, table, token_embedding
from loadmaster.describe.model import Block, Model
from loadmaster.describe.op import Attention, OpKind, Split

__all__ = ["ALIASES", "t5"]

ALIASES = {
    "hidden_size": ("d_model",), "num_attention_heads": ("num_heads",), "num_hidden_layers": ("num_layers",),
    "head_dim": ("d_kv",),
}  # fmt: skip


def t5(fields: Fields, *, name: str, model_type: str, with_head: bool) -> Model:
    """T5ForConditionalGeneration, or T5Model without the head."""
    hidden, vocab_size = fields.count("hidden_size"), fields.count("vocab_size")
    num_layers = fields.layers()
    num_decoder_layers = fields.layers("num_decoder_layers", num_layers)
    return Model(
        name=name, family=model_type, hidden_size=hidden, vocab_size=vocab_size, embedding=_embedding(fields),
        blocks=(*_stack(fields, "encoder", num_layers), *_stack(fields, "decoder", num_decoder_layers)),
        head=_head(fields, with_head),
    )  # fmt: skip


def _embedding(fields: Fields) -> Block:
    """One table for both sides; the encoder's final norm stands here too, being part of no layer."""
    hidden = fields.count("hidden_size")
    flow = Flow("embedding", "", width=None)
    x = token_embedding(flow, "shared.weight", vocab_size=fields.count("vocab_size"), width=hidden)
    flow.value("encoder.last", hidden, split=Split.SEQUENCE)
    y = flow.norm("encoder.final_norm", "encoder.last", weight="encoder.final_layer_norm")
    flow.dropout("encoder.final_dropout", y, fields.rate("dropout_rate", 0.1))
    return flow.done(flow.dropout("tokens.dropout", x, fields.rate("dropout_rate", 0.1)), input="input_ids")


def _head(fields: Fields, with_head: bool) -> Block:
    hidden = fields.count("hidden_size")
    flow = Flow("head", "", width=hidden)
    x = flow.norm("final_norm", "input", weight="decoder.final_layer_norm")
    x = flow.dropout("final_dropout", x, fields.rate("dropout_rate", 0.1))
    if with_head:
        tied = fields.flag("tie_word_embeddings", True)
        if tied:
            x = flow.pointwise("final_scale", OpKind.SCALE, x)
        x = language_head(
            flow, x, weight="lm_head", width=hidden, vocab_size=fields.count("vocab_size"),
            tied_to="shared.weight" if tied else None,
        )  # fmt: skip
    return flow.done(x)


def _stack(fields: Fields, side: str, num_layers: int) -> tuple[tuple[Block, int], ...]:
    """The first layer of a stack owns the table of position biases that all of them add."""
    first = (_block(fields, side, index=0), 1)
    return (first, (_block(fields, side, index=1), num_layers - 1)) if num_layers > 1 else (first,)


def _block(fields: Fields, side: str, *, index: int) -> Block:
    decoder = side == "decoder"
    flow = Flow(side, f"{side}.block.{{}}.", width=fields.count("hidden_size"))
    bias = _position_bias(fields, flow, owner=index == 0)
    x = _attention(fields, flow, "input", layer=0, module="SelfAttention", causal=decoder, bias=bias)
    if decoder:
        flow.value(
            "encoder.output", fields.count("hidden_size"), split=Split.SEQUENCE, alias="embedding/encoder.output"
        )
        x = _attention(fields, flow, x, layer=1, module="EncDecAttention", causal=False, keys="encoder.output")
    return flow.done(_mlp(fields, flow, x, f"layer.{2 if decoder else 1}"), first_index=index)


def _position_bias(fields: Fields, flow: Flow, *, owner: bool) -> str:
    num_heads = fields.count("num_attention_heads")
    name = "attention.position_bias"
    if not owner:
        return flow.value(name, num_heads, batch_power=0, seq_power=2, split=Split.TP, alias=f"first/{name}")
    flow.value(name, num_heads, batch_power=0, seq_power=2, split=Split.TP)
    weight = table(
        "layer.0.SelfAttention.relative_attention_bias.weight",
        fields.count("relative_attention_num_buckets", 32),
        num_heads,
    )
    return flow.op(name, OpKind.POSITION, (), (name,), weights=(weight,), function="relative")


def _attention(
    fields: Fields, flow: Flow, x: str, *, layer: int, module: str, causal: bool, bias: str = "",
    keys: str | None = None,
) -> str:  # fmt: skip
    hidden, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    head_dim, rate = fields.count("head_dim", 64), fields.rate("dropout_rate", 0.1)
    name = "cross" if keys else "attention"
    core = Attention(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, v_head_dim=head_dim, causal=causal,
        dropout=rate, bias=bool(bias),
    )  # fmt: skip
    y = flow.norm(f"{name}_norm", x, weight=f"layer.{layer}.layer_norm")
    below = f"layer.{layer}.{module}"
    qkv = separate_qkv(
        flow, y, core, weights=(f"{below}.q", f"{below}.k", f"{below}.v"), bias=(False, False, False), width=hidden,
        keys=keys, name=name,
    )  # fmt: skip
    y = attend(flow, qkv, core, weight=f"{below}.o", width=hidden, bias=False, name=name, extra=(bias,) if bias else ())
    return flow.add(f"{name}.residual", x, flow.dropout(f"{name}.dropout", y, rate))


def _mlp(fields: Fields, flow: Flow, x: str, below: str) -> str:
    """wo(dropout(act(wi x))), or with act(wi_0 x) * (wi_1 x) where the activation is gated."""
    hidden, inner, rate = (
        fields.count("hidden_size"),
        fields.count("d_ff"),
        fields.rate("dropout_rate", 0.1),
    )
    words = fields.text("feed_forward_proj", "relu").split("-")
    if len(words) > 2 or (len(words) == 2 and words[0] != "gated"):
        fields.refuse(
            "feed_forward_proj", "-".join(words), "must be an activation or gated-<activation>", "use gated-gelu"
        )
    y = flow.norm("mlp_norm", x, weight=f"{below}.layer_norm")
    names = ("wi",) if len(words) == 1 else ("wi_0", "wi_1")
    parts = [
        flow.linear(f"mlp.{n}", y, weight=f"{below}.DenseReluDense.{n}", d_in=hidden, d_out=inner, split="column")
        for n in names
    ]
    z = flow.pointwise("mlp.activation", OpKind.ACTIVATION, parts[0], function=words[-1])
    if len(parts) == 2:
        z = flow.pointwise("mlp.product", OpKind.MULTIPLY, z, parts[1])
    z = flow.dropout("mlp.activation_dropout", z, rate)
    z = flow.linear("mlp.down", z, weight=f"{below}.DenseReluDense.wo", d_in=inner, d_out=hidden, split="row")
    return flow.add("mlp.residual", x, flow.dropout("mlp.dropout", z, rate))
