"""GPT-2: learned positions, layer norms, one fused qkv matrix stored (in, out), a plain MLP, a tied head."""

from __future__ import annotations

from loadmaster.describe.families.classic import attend, fused_qkv, layer_norm, plain_mlp, whole_heads
from loadmaster.describe.families.fields import Fields
from loadmaster.describe.families.flow import Flow
from loadmaster.describe.families.stem import Stem, assemble
from loadmaster.describe.model import Block, Model

__all__ = ["ALIASES", "gpt2"]

ALIASES = {
    "hidden_size": ("n_embd",), "num_hidden_layers": ("n_layer",), "num_attention_heads": ("n_head",),
    "max_position_embeddings": ("n_positions", "n_ctx"),
}  # fmt: skip


def gpt2(fields: Fields, *, name: str, model_type: str, with_head: bool) -> Model:
    """GPT-2 of any size."""
    if fields.flag("add_cross_attention", False):
        fields.refuse("add_cross_attention", True, "is not written out here", "describe the decoder alone")
    base = "transformer." if with_head else ""
    positions = fields.count("max_position_embeddings", 1024)
    stem = Stem(
        name=name, family=model_type, hidden=fields.count("hidden_size"), vocab_size=fields.count("vocab_size"),
        tied=fields.flag("tie_word_embeddings", True), base=base, with_head=with_head, embed="wte", final_norm="ln_f",
        norm="layer", norm_bias=True, positions=("wpe", positions), max_seq_len=positions,
        embedding_dropout=fields.rate("embd_pdrop", 0.1),
    )  # fmt: skip
    return assemble(stem, [_block(fields, f"{base}h.{{}}.")] * fields.layers())


def _block(fields: Fields, prefix: str) -> Block:
    hidden, rate = fields.count("hidden_size"), fields.rate("resid_pdrop", 0.1)
    core = whole_heads(fields, dropout=fields.rate("attn_pdrop", 0.1))
    flow = Flow("decoder", prefix, width=hidden)
    y = layer_norm(flow, "attention_norm", "input", "ln_1")
    qkv = fused_qkv(flow, y, core, width=hidden, weight="attn.c_attn", bias=True, transposed=True)
    y = attend(flow, qkv, core, weight="attn.c_proj", width=hidden, transposed=True)
    x = flow.add("attention.residual", "input", flow.dropout("attention.dropout", y, rate))
    y = layer_norm(flow, "mlp_norm", x, "ln_2")
    y = plain_mlp(
        flow, y, width=hidden, inner=fields.count("n_inner", 4 * hidden), up="mlp.c_fc", down="mlp.c_proj",
        activation=fields.text("activation_function", "gelu_new"), transposed=True,
    )  # fmt: skip
    return flow.done(flow.add("mlp.residual", x, flow.dropout("mlp.dropout", y, rate)))
