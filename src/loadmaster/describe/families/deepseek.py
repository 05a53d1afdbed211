"""DeepSeek V2 and V3: keys and values from one low-rank latent, dense first layers, then shared and routed experts.

As transformers builds them: every layer from first_k_dense_replace on holds experts (moe_layer_freq is 1 in all
published configs), and the extra next-token-prediction module of V3's checkpoint is no part of the model.
"""

from __future__ import annotations

from dataclasses import replace

from loadmaster.describe.families.decoder import gated_mlp
from loadmaster.describe.families.fields import Fields
from loadmaster.describe.families.flow import Flow
from loadmaster.describe.families.moe import Experts, experts_mlp, read_experts
from loadmaster.describe.families.stem import Stem, assemble
from loadmaster.describe.model import Block, Model
from loadmaster.describe.op import Attention, OpKind, Split

__all__ = ["ALIASES", "deepseek"]

ALIASES = {"num_experts": ("n_routed_experts", "num_local_experts")}


def deepseek(fields: Fields, *, name: str, model_type: str, with_head: bool) -> Model:
    """DeepSeek V2 or V3 of any size."""
    third = model_type == "deepseek_v3"
    base = "model." if with_head else ""
    stem = Stem(
        name=name, family=model_type, hidden=fields.count("hidden_size"), vocab_size=fields.count("vocab_size"),
        tied=fields.flag("tie_word_embeddings", False), base=base, with_head=with_head,
        rope_width=fields.count("qk_rope_head_dim", 64),
    )  # fmt: skip
    num_layers = fields.layers()
    num_dense = min(fields.count("first_k_dense_replace", 3 if third else 0, minimum=0), num_layers)
    prefix = f"{base}layers.{{}}."
    dense, experts = _block(fields, prefix, None, third), None
    if num_dense < num_layers:
        experts = _block(fields, prefix, _experts(fields, third), third)
    return assemble(stem, [dense] * num_dense + [experts or dense] * (num_layers - num_dense))


def _experts(fields: Fields, third: bool) -> Experts:
    experts = read_experts(fields, inner="moe_intermediate_size", num_experts=256 if third else 64)
    shared = fields.count("n_shared_experts", 1 if third else 2, minimum=0)
    return replace(
        experts, shared=shared * experts.inner, correction_bias=third,
        mlp_bias=not third and fields.flag("mlp_bias", False),
    )  # fmt: skip


def _block(fields: Fields, prefix: str, experts: Experts | None, third: bool) -> Block:
    hidden = fields.count("hidden_size")
    flow = Flow("moe" if experts else "decoder", prefix, width=hidden)
    y = flow.norm("attention_norm", "input", weight="input_layernorm")
    x = flow.add("attention.residual", "input", _latent_attention(fields, flow, y))
    y = flow.norm("mlp_norm", x, weight="post_attention_layernorm")
    if experts:
        y = experts_mlp(experts)(flow, y)
    else:
        y = gated_mlp(
            flow, y, width=hidden, inner=fields.count("intermediate_size"),
            activation=fields.text("hidden_act", "silu"), bias=not third and fields.flag("mlp_bias", False),
        )  # fmt: skip
    return flow.done(flow.add("mlp.residual", x, y))


def _latent_attention(fields: Fields, flow: Flow, x: str) -> str:
    """Multi-head latent attention (DeepSeek-V2, 2024, arXiv 2405.04434, section 2.1)."""
    hidden, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    fields.divides("num_attention_heads", num_heads, "hidden_size", hidden)
    nope, rope = fields.count("qk_nope_head_dim", 128), fields.count("qk_rope_head_dim", 64)
    v_dim, rank = fields.count("v_head_dim", 128), fields.count("kv_lora_rank", 512)
    biased = fields.flag("attention_bias", False)
    q = _queries(fields, flow, x, num_heads * (nope + rope), num_heads)
    latent = flow.linear(
        "attention.kv_latent", x, weight="self_attn.kv_a_proj_with_mqa", d_in=hidden, d_out=rank + rope, bias=biased
    )
    kv = flow.value("attention.kv_compressed", rank, alias=latent)
    k_rope = flow.value("attention.k_rope_in", rope, alias=latent)
    kv = flow.norm("attention.kv_norm", kv, weight="self_attn.kv_a_layernorm")
    both = flow.linear(
        "attention.kv", kv, weight="self_attn.kv_b_proj", d_in=rank, d_out=num_heads * (nope + v_dim), split="column",
        units=num_heads,
    )  # fmt: skip
    q, k = _assemble_keys(flow, q, both, k_rope, num_heads, nope, rope)
    v = flow.value("attention.v", num_heads * v_dim, split=Split.TP, alias=both)
    core = Attention(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=nope + rope, v_head_dim=v_dim,
        dropout=fields.rate("attention_dropout"),
    )  # fmt: skip
    y = flow.attention("attention.core", (q, k, v), core)
    return flow.linear(
        "attention.out", y, weight="self_attn.o_proj", d_in=num_heads * v_dim, d_out=hidden, bias=biased, split="row",
        units=num_heads,
    )  # fmt: skip


def _queries(fields: Fields, flow: Flow, x: str, width: int, num_heads: int) -> str:
    """Full-rank where q_lora_rank is null, through a normed latent elsewhere."""
    hidden = fields.count("hidden_size")
    rank = fields.optional_count("q_lora_rank") if "q_lora_rank" in fields.raw else 1536
    weight, d_in = "self_attn.q_proj", hidden
    if rank:
        x = flow.linear(
            "attention.q_latent", x, weight="self_attn.q_a_proj", d_in=hidden, d_out=rank,
            bias=fields.flag("attention_bias", False),
        )  # fmt: skip
        x = flow.norm("attention.q_norm", x, weight="self_attn.q_a_layernorm")
        weight, d_in = "self_attn.q_b_proj", rank
    return flow.linear("attention.q", x, weight=weight, d_in=d_in, d_out=width, split="column", units=num_heads)


def _assemble_keys(flow: Flow, q: str, kv: str, k_rope: str, num_heads: int, nope: int, rope: int) -> tuple[str, str]:
    """Turn the rotary parts, then join them to the others: one rotary key serves all heads."""
    for name in ("cos", "sin"):
        flow.value(name, rope, batch_power=0, alias=f"embedding/{name}")
    turned = (
        flow.value("attention.q_rope", num_heads * rope, split=Split.TP), flow.value("attention.k_rope", rope),
    )  # fmt: skip
    flow.op("attention.rope", OpKind.ROPE, (q, k_rope, "cos", "sin"), turned, function="rotate_half")
    joined = tuple(flow.value(f"attention.{n}_joined", num_heads * (nope + rope), split=Split.TP) for n in ("q", "k"))
    flow.op("attention.q_join", OpKind.OTHER, (q, turned[0]), (joined[0],), function="concatenate")
    flow.op("attention.k_join", OpKind.OTHER, (kv, turned[1]), (joined[1],), function="concatenate")
    return joined[0], joined[1]
