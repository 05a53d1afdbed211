"""GPT-J: one norm feeds attention and MLP side by side; rotary positions on part of a head; a head with a bias."""

from __future__ import annotations

from loadmaster.describe.families.classic import attend, layer_norm, plain_mlp, separate_qkv, whole_heads
from loadmaster.describe.families.fields import Fields
from loadmaster.describe.families.flow import Flow
from loadmaster.describe.families.gpt2 import ALIASES
from loadmaster.describe.families.stem import Stem, assemble
from loadmaster.describe.model import Block, Model

__all__ = ["ALIASES", "gptj"]


def gptj(fields: Fields, *, name: str, model_type: str, with_head: bool) -> Model:
    """GPT-J of any size."""
    base = "transformer." if with_head else ""
    stem = Stem(
        name=name, family=model_type, hidden=fields.count("hidden_size"), vocab_size=fields.count("vocab_size"),
        tied=fields.flag("tie_word_embeddings", False), base=base, with_head=with_head, head_bias=True, embed="wte",
        final_norm="ln_f", norm="layer", norm_bias=True, embedding_dropout=fields.rate("embd_pdrop"),
        rope_width=fields.count("rotary_dim", 64),
    )  # fmt: skip
    return assemble(stem, [_block(fields, f"{base}h.{{}}.")] * fields.layers())


def _block(fields: Fields, prefix: str) -> Block:
    hidden, rate = fields.count("hidden_size"), fields.rate("resid_pdrop")
    core = whole_heads(fields, dropout=fields.rate("attn_pdrop"))
    flow = Flow("decoder", prefix, width=hidden)
    x = layer_norm(flow, "attention_norm", "input", "ln_1")
    names = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
    qkv = separate_qkv(flow, x, core, weights=names, bias=(False, False, False), width=hidden)
    y = attend(
        flow, qkv, core, weight="attn.out_proj", width=hidden, bias=False, rope_width=fields.count("rotary_dim", 64)
    )
    y = flow.dropout("attention.dropout", y, rate)
    z = plain_mlp(
        flow, x, width=hidden, inner=fields.count("n_inner", 4 * hidden), up="mlp.fc_in", down="mlp.fc_out",
        activation=fields.text("activation_function", "gelu_new"),
    )  # fmt: skip
    z = flow.add("mlp.sum", y, flow.dropout("mlp.dropout", z, rate))
    return flow.done(flow.add("mlp.residual", z, "input"))
