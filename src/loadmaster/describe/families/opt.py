"""OPT: learned positions with two spare rows, norms before or after a branch, an embedding narrower than the stream."""

from __future__ import annotations

from loadmaster.describe.families.classic import attend, layer_norm, plain_mlp, separate_qkv, whole_heads
from loadmaster.describe.families.fields import Fields
from loadmaster.describe.families.flow import Flow
from loadmaster.describe.families.stem import Stem, assemble
from loadmaster.describe.model import Block, Model

__all__ = ["opt"]

SPARE_ROWS = 2  # positions are looked up two rows further down


def opt(fields: Fields, *, name: str, model_type: str, with_head: bool) -> Model:
    """OPT of any size (350m is the one with norms after the branches and a narrow embedding)."""
    hidden = fields.count("hidden_size")
    positions = fields.count("max_position_embeddings", 2048)
    base = "model.decoder." if with_head else "decoder."
    before = fields.flag("do_layer_norm_before", True)
    affine = fields.flag("layer_norm_elementwise_affine", True)
    stem = Stem(
        name=name, family=model_type, hidden=hidden, vocab_size=fields.count("vocab_size"),
        tied=fields.flag("tie_word_embeddings", True), base=base, with_head=with_head,
        embedding_width=fields.count("word_embed_proj_dim", hidden),
        final_norm="final_layer_norm" if before and not fields.flag("_remove_final_layer_norm", False) else "",
        norm="layer", norm_bias=affine, norm_affine=affine, positions=("embed_positions", positions + SPARE_ROWS),
        max_seq_len=positions,
    )  # fmt: skip
    return assemble(stem, [_block(fields, f"{base}layers.{{}}.")] * fields.layers())


def _block(fields: Fields, prefix: str) -> Block:
    hidden, rate = fields.count("hidden_size"), fields.rate("dropout", 0.1)
    core = whole_heads(fields, dropout=fields.rate("attention_dropout"))
    biased, affine = fields.flag("enable_bias", True), fields.flag("layer_norm_elementwise_affine", True)
    before = fields.flag("do_layer_norm_before", True)
    flow = Flow("decoder", prefix, width=hidden)

    def norm(name: str, x: str, weight: str, *, here: bool) -> str:
        return layer_norm(flow, name, x, weight, affine=affine) if here else x

    y = norm("attention_norm", "input", "self_attn_layer_norm", here=before)
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv = separate_qkv(flow, y, core, weights=names, bias=(biased, biased, biased), width=hidden, scaled=True)
    y = attend(flow, qkv, core, weight="self_attn.out_proj", width=hidden, bias=biased)
    x = flow.add("attention.residual", "input", flow.dropout("attention.dropout", y, rate))
    x = norm("attention_norm", x, "self_attn_layer_norm", here=not before)
    y = norm("mlp_norm", x, "final_layer_norm", here=before)
    y = plain_mlp(
        flow, y, width=hidden, inner=fields.count("ffn_dim"), up="fc1", down="fc2", bias=biased,
        activation=fields.text("activation_function", "relu"),
    )  # fmt: skip
    x = flow.add("mlp.residual", x, flow.dropout("mlp.dropout", y, rate))
    return flow.done(norm("mlp_norm", x, "final_layer_norm", here=not before))
