"""MPT: ALiBi, no biases anywhere, a tied head.

As transformers builds it: no position table even without ALiBi, an MLP of four times the width, norms without bias.
"""

from __future__ import annotations

from loadmaster.describe.families.classic import attend, fused_qkv, layer_norm, plain_mlp, whole_heads
from loadmaster.describe.families.fields import Fields
from loadmaster.describe.families.flow import Flow
from loadmaster.describe.families.stem import Stem, assemble
from loadmaster.describe.model import Block, Model

__all__ = ["ALIASES", "mpt"]

ALIASES = {
    "hidden_size": ("d_model",), "num_hidden_layers": ("n_layers",), "num_attention_heads": ("n_heads",),
}  # fmt: skip


def mpt(fields: Fields, *, name: str, model_type: str, with_head: bool) -> Model:
    """MPT of any size."""
    base = "transformer." if with_head else ""
    stem = Stem(
        name=name, family=model_type, hidden=fields.count("hidden_size"), vocab_size=fields.count("vocab_size"),
        tied=fields.flag("tie_word_embeddings", True), base=base, with_head=with_head, embed="wte",
        final_norm="norm_f", norm="layer",
    )  # fmt: skip
    return assemble(stem, [_block(fields, f"{base}blocks.{{}}.")] * fields.layers())


def _block(fields: Fields, prefix: str) -> Block:
    hidden = fields.count("hidden_size")
    rate = fields.mapping("attn_config").rate("attn_pdrop")
    core = whole_heads(fields, dropout=rate, bias=True)
    flow = Flow("decoder", prefix, width=hidden)
    y = layer_norm(flow, "attention_norm", "input", "norm_1", bias=False)
    qkv = fused_qkv(flow, y, core, width=hidden, weight="attn.Wqkv", bias=False)
    y = attend(flow, qkv, core, weight="attn.out_proj", width=hidden, bias=False, function="eager")
    x = flow.add("attention.residual", "input", flow.dropout("attention.dropout", y, rate))
    y = layer_norm(flow, "mlp_norm", x, "norm_2", bias=False)
    y = plain_mlp(
        flow, y, width=hidden, inner=4 * hidden, up="ffn.up_proj", down="ffn.down_proj", activation="gelu", bias=False
    )
    return flow.done(flow.add("mlp.residual", x, flow.dropout("mlp.dropout", y, rate)))
