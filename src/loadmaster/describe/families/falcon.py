"""Falcon: the old decoder (one KV head, one norm for attention and MLP) and the new one (KV groups, two norms)."""

from __future__ import annotations

from dataclasses import replace

from loadmaster.describe.families.classic import attend, fused_qkv, layer_norm, plain_mlp, whole_heads
from loadmaster.describe.families.fields import Fields
from loadmaster.describe.families.flow import Flow
from loadmaster.describe.families.stem import Stem, assemble
from loadmaster.describe.model import Block, Model
from loadmaster.describe.op import Attention

__all__ = ["ALIASES", "falcon"]

ALIASES = {
    "num_hidden_layers": ("n_layer",), "num_attention_heads": ("n_head",), "num_kv_heads": ("n_head_kv",),
}  # fmt: skip


def falcon(fields: Fields, *, name: str, model_type: str, with_head: bool) -> Model:
    """Falcon of any size."""
    hidden = fields.count("n_embed" if fields.has("n_embed") else "hidden_size")
    fields = Fields({**fields.raw, "hidden_size": hidden}, aliases=ALIASES)
    core = _core(fields)
    base = "transformer." if with_head else ""
    stem = Stem(
        name=name, family=model_type, hidden=hidden, vocab_size=fields.count("vocab_size"),
        tied=fields.flag("tie_word_embeddings", True), base=base, with_head=with_head, embed="word_embeddings",
        final_norm="ln_f", norm="layer", norm_bias=True, rope_width=0 if core.bias else core.head_dim,
    )  # fmt: skip
    return assemble(stem, [_block(fields, core, f"{base}h.{{}}.")] * fields.layers())


def _core(fields: Fields) -> Attention:
    """Multi-query means one KV head in the old decoder, whatever num_kv_heads says."""
    core = whole_heads(fields, dropout=fields.rate("attention_dropout"), bias=fields.flag("alibi", False))
    if fields.flag("new_decoder_architecture", False):
        num_kv_heads = fields.count("num_kv_heads", core.num_heads)
        fields.divides("num_kv_heads", num_kv_heads, "num_attention_heads", core.num_heads)
        return replace(core, num_kv_heads=num_kv_heads)
    return replace(core, num_kv_heads=1) if fields.flag("multi_query", True) else core


def _norms(fields: Fields) -> tuple[str, str]:
    """State-dict names of the norms before attention and before the MLP; one name for both where they share it."""
    new = fields.flag("new_decoder_architecture", False)
    if not fields.flag("parallel_attn", True):
        return "input_layernorm", "post_attention_layernorm"
    count = fields.count("num_ln_in_parallel_attn", 2 if new else 1)
    return ("ln_attn", "ln_mlp") if count == 2 else ("input_layernorm", "input_layernorm")


def _block(fields: Fields, core: Attention, prefix: str) -> Block:
    hidden, biased = fields.count("hidden_size"), fields.flag("bias", False)
    before, between = _norms(fields)
    side_by_side = fields.flag("parallel_attn", True)
    flow = Flow("decoder", prefix, width=hidden)
    x = layer_norm(flow, "attention_norm", "input", before)
    qkv = fused_qkv(flow, x, core, width=hidden, weight="self_attention.query_key_value", bias=biased)
    y = attend(
        flow, qkv, core, weight="self_attention.dense", width=hidden, bias=biased,
        rope_width=0 if core.bias else core.head_dim,
    )  # fmt: skip
    stream = "input"
    if not side_by_side:
        y = flow.dropout("attention.dropout", y, core.dropout)
        stream = flow.add("attention.residual", "input", y)
    z = x if between == before else layer_norm(flow, "mlp_norm", stream, between)
    z = plain_mlp(
        flow, z, width=hidden, inner=fields.count("ffn_hidden_size", 4 * hidden), up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h", activation=fields.text("activation", "gelu"), bias=biased,
    )  # fmt: skip
    if side_by_side:
        z = flow.add("mlp.sum", z, y)
    return flow.done(flow.add("mlp.residual", stream, flow.dropout("mlp.dropout", z, fields.rate("hidden_dropout"))))
