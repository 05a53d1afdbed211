"""GPT-NeoX and Pythia: partial rotary positions, attention and MLP side by side, an untied head."""

from __future__ import annotations

from loadmaster.describe.families.classic import attend, fused_qkv, layer_norm, plain_mlp, whole_heads
from loadmaster.describe.families.fields import Fields
from loadmaster.describe.families.flow import Flow
from loadmaster.describe.families.stem import Stem, assemble
from loadmaster.describe.model import Block, Model

__all__ = ["gpt_neox"]


def gpt_neox(fields: Fields, *, name: str, model_type: str, with_head: bool) -> Model:
    """GPT-NeoX of any size."""
    base = "gpt_neox." if with_head else ""
    stem = Stem(
        name=name, family=model_type, hidden=fields.count("hidden_size"), vocab_size=fields.count("vocab_size"),
        tied=fields.flag("tie_word_embeddings", False), base=base, with_head=with_head, embed="embed_in",
        final_norm="final_layer_norm", norm="layer", norm_bias=True, rope_width=_rope_width(fields),
        embedding_dropout=fields.rate("hidden_dropout"),
    )  # fmt: skip
    return assemble(stem, [_block(fields, f"{base}layers.{{}}.")] * fields.layers())


def _rope_width(fields: Fields) -> int:
    share = fields.mapping("rope_parameters").number("partial_rotary_factor") or fields.number("rotary_pct", 0.25)
    return int(whole_heads(fields, dropout=0.0).head_dim * (share or 0.25))


def _block(fields: Fields, prefix: str) -> Block:
    hidden, rate, biased = (
        fields.count("hidden_size"),
        fields.rate("hidden_dropout"),
        fields.flag("attention_bias", True),
    )
    core = whole_heads(fields, dropout=fields.rate("attention_dropout"))
    flow = Flow("decoder", prefix, width=hidden)
    y = layer_norm(flow, "attention_norm", "input", "input_layernorm")
    qkv = fused_qkv(flow, y, core, width=hidden, weight="attention.query_key_value", bias=biased)
    y = attend(flow, qkv, core, weight="attention.dense", width=hidden, bias=biased, rope_width=_rope_width(fields),
               function="sdpa_copied")  # fmt: skip
    y = flow.dropout("attention.dropout", y, rate)
    parallel = fields.flag("use_parallel_residual", True)
    x = "input" if parallel else flow.add("attention.residual", y, "input")
    z = layer_norm(flow, "mlp_norm", x, "post_attention_layernorm")
    z = plain_mlp(
        flow, z, width=hidden, inner=fields.count("intermediate_size"), up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h", activation=fields.text("hidden_act", "gelu"),
    )  # fmt: skip
    z = flow.dropout("mlp.dropout", z, rate)
    if parallel:
        return flow.done(flow.add("mlp.residual", flow.add("mlp.sum", z, y), "input"))
    return flow.done(flow.add("mlp.residual", z, x))
