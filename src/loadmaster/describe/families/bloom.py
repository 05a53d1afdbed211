"""BLOOM: ALiBi in place of positions, a norm on the embedding, a tied head."""

from __future__ import annotations

from loadmaster.describe.families.classic import attend, fused_qkv, layer_norm, plain_mlp, whole_heads
from loadmaster.describe.families.fields import Fields
from loadmaster.describe.families.flow import Flow
from loadmaster.describe.families.stem import Stem, assemble
from loadmaster.describe.model import Block, Model

__all__ = ["ALIASES", "bloom"]

# n_embed overrides hidden_size where a config has both
ALIASES = {
    "num_hidden_layers": ("n_layer",), "num_attention_heads": ("n_head",),
}  # fmt: skip


def bloom(fields: Fields, *, name: str, model_type: str, with_head: bool) -> Model:
    """BLOOM of any size."""
    width = "n_embed" if fields.has("n_embed") else "hidden_size"
    hidden = fields.count(width)
    fields = Fields({**fields.raw, "hidden_size": hidden}, aliases=ALIASES)
    base = "transformer." if with_head else ""
    stem = Stem(
        name=name, family=model_type, hidden=hidden, vocab_size=fields.count("vocab_size"),
        tied=fields.flag("tie_word_embeddings", True), base=base, with_head=with_head, embed="word_embeddings",
        final_norm="ln_f", norm="layer", norm_bias=True, embedding_norm="word_embeddings_layernorm",
    )  # fmt: skip
    return assemble(stem, [_block(fields, f"{base}h.{{}}.")] * fields.layers())


def _block(fields: Fields, prefix: str) -> Block:
    hidden, rate = fields.count("hidden_size"), fields.rate("hidden_dropout")
    core = whole_heads(fields, dropout=fields.rate("attention_dropout"), bias=True)
    after = fields.flag("apply_residual_connection_post_layernorm", False)
    flow = Flow("decoder", prefix, width=hidden)
    y = layer_norm(flow, "attention_norm", "input", "input_layernorm")
    residual = y if after else "input"
    qkv = fused_qkv(flow, y, core, width=hidden, weight="self_attention.query_key_value", bias=True)
    y = attend(flow, qkv, core, weight="self_attention.dense", width=hidden, function="eager")
    x = flow.add("attention.residual", residual, flow.dropout("attention.dropout", y, rate))
    y = layer_norm(flow, "mlp_norm", x, "post_attention_layernorm")
    residual = y if after else x
    y = plain_mlp(
        flow, y, width=hidden, inner=4 * hidden, up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h",
        activation="gelu_tanh",
    )  # fmt: skip
    return flow.done(flow.add("mlp.residual", residual, flow.dropout("mlp.dropout", y, rate)))
