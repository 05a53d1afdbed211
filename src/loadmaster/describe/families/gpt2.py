"""GPT-2: learned positions, layer norms, one fused qkv matrix stored (in, out), a plain MLP, a tied head."""

from __future__ import annotations

from loadmaster.describe.families import ends
from loadmaster.describe.families.classic import plain_mlp, position_table
from loadmaster.describe.families.decoder import slices
from loadmaster.describe.families.fields import Fields
from loadmaster.describe.families.flow import Flow
from loadmaster.describe.model import Block, Model
from loadmaster.describe.op import Attention

__all__ = ["ALIASES", "gpt2"]

ALIASES = {
    "hidden_size": ("n_embd",), "num_hidden_layers": ("n_layer",), "num_attention_heads": ("n_head",),
    "max_position_embeddings": ("n_positions", "n_ctx"), "intermediate_size": ("n_inner",),
}  # fmt: skip


def gpt2(fields: Fields, *, name: str, model_type: str, with_head: bool) -> Model:
    """GPT-2 of any size."""
    hidden, vocab_size = fields.count("hidden_size"), fields.count("vocab_size")
    if fields.flag("add_cross_attention", False):
        fields.refuse("add_cross_attention", True, "is not written out", "train the decoder alone")
    base = "transformer." if with_head else ""
    positions = fields.count("max_position_embeddings", 1024)
    embedding = Flow("embedding", base, width=None)
    x = ends.token_embedding(embedding, "wte.weight", vocab_size=vocab_size, width=hidden)
    x = position_table(embedding, x, "wpe.weight", rows=positions)
    x = embedding.dropout("tokens.dropout", x, fields.rate("embd_pdrop", 0.1))
    head = Flow("head", "", width=hidden)
    y = head.norm("final_norm", "input", weight=f"{base}ln_f", function="layer", bias=True)
    if with_head:
        tied = f"{base}wte.weight" if fields.flag("tie_word_embeddings", True) else None
        y = ends.language_head(head, y, weight="lm_head", width=hidden, vocab_size=vocab_size, tied_to=tied)
    return Model(
        name=name, family=model_type, hidden_size=hidden, vocab_size=vocab_size,
        embedding=embedding.done(x, input="input_ids"), blocks=((_block(fields, f"{base}h.{{}}."), fields.layers()),),
        head=head.done(y), max_seq_len=positions,
    )  # fmt: skip


def _block(fields: Fields, prefix: str) -> Block:
    hidden, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    head_dim = fields.divides("num_attention_heads", num_heads, "hidden_size", hidden)
    core = Attention(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, v_head_dim=head_dim,
        dropout=fields.rate("attn_pdrop", 0.1),
    )  # fmt: skip
    rate = fields.rate("resid_pdrop", 0.1)
    flow = Flow("decoder", prefix, width=hidden)
    y = flow.norm("attention_norm", "input", weight="ln_1", function="layer", bias=True)
    qkv = flow.linear(
        "attention.qkv", y, weight="attn.c_attn", d_in=hidden, d_out=3 * hidden, bias=True, split="column",
        units=num_heads, transposed=True,
    )  # fmt: skip
    y = flow.attention("attention.core", slices(flow, qkv, core), core)
    y = flow.linear(
        "attention.out", y, weight="attn.c_proj", d_in=hidden, d_out=hidden, bias=True, split="row", units=num_heads,
        transposed=True,
    )  # fmt: skip
    x = flow.add("attention.residual", "input", flow.dropout("attention.dropout", y, rate))
    y = flow.norm("mlp_norm", x, weight="ln_2", function="layer", bias=True)
    y = plain_mlp(
        flow, y, width=hidden, inner=fields.count("intermediate_size", 4 * hidden), up="mlp.c_fc", down="mlp.c_proj",
        activation=fields.text("activation_function", "gelu_new"), transposed=True,
    )  # fmt: skip
    return flow.done(flow.add("mlp.residual", x, flow.dropout("mlp.dropout", y, rate)))
