"""The decoder layer that most models share: norm, rotary attention, norm, gated MLP, and its variations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from loadmaster.describe.families.flow import Flow
from loadmaster.describe.families.stem import Stem, assemble
from loadmaster.describe.model import Block, Model
from loadmaster.describe.op import Attention, OpKind

__all__ = ["Layer", "build", "decoder_layer", "gated_mlp", "rotate", "slices"]

Mlp = Callable[[Flow, str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Shape of one decoder layer.

    Attributes:
        hidden, intermediate: widths of the stream and inside the MLP.
        attention: its core.
        qkv_bias, out_bias, mlp_bias: which linear layers have one.
        qk_norm: ``head`` (one norm of head_dim shared by all heads), ``full`` (over the whole projection) or none.
        placement: norms ``pre`` each branch, ``post`` it (OLMo 2), or ``sandwich`` (Gemma 2 and 3).
        norm: ``rms``, ``rms_unit`` (weight + 1) or ``rms_fp32`` (multiplied by its weight in fp32).
        attention_function: ``sdpa``, ``sdpa_copied`` (q and k are put together of two parts) or ``eager``.
        rotary: whether positions turn q and k; fused: one qkv and one gate-up matrix (Phi-3).
        residual_dropout: rate before each residual sum; scaled: branches are multiplied by a constant (Granite).
        activation: of the gate. mlp: builds another MLP (experts) in its place.
    """

    hidden: int
    intermediate: int
    attention: Attention
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["", "head", "full"] = ""
    placement: Literal["pre", "post", "sandwich"] = "pre"
    norm: str = "rms"
    rotary: bool = True
    fused: bool = False
    residual_dropout: float = 0.0
    scaled: bool = False
    activation: str = "silu"
    attention_function: str = "sdpa"
    mlp: Mlp | None = None


def decoder_layer(layer: Layer, *, prefix: str, name: str = "decoder") -> Block:
    """The layer's ops and values."""
    flow = Flow(name, prefix, width=layer.hidden)
    x = _branch(flow, layer, "attention", "input", _attention)
    x = _branch(flow, layer, "mlp", x, _mlp)
    return flow.done(x)


# state-dict names of the norms before and after a branch, by placement
_NORMS = {
    ("pre", "attention"): ("input_layernorm", ""),
    ("pre", "mlp"): ("post_attention_layernorm", ""),
    ("post", "attention"): ("", "post_attention_layernorm"),
    ("post", "mlp"): ("", "post_feedforward_layernorm"),
    ("sandwich", "attention"): ("input_layernorm", "post_attention_layernorm"),
    ("sandwich", "mlp"): ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
}


def _branch(flow: Flow, layer: Layer, name: str, x: str, body: Callable[[Flow, Layer, str], str]) -> str:
    """x + body(norm(x)), norms where the layer places them."""
    before, after = _NORMS[layer.placement, name]
    y = flow.norm(f"{name}_norm", x, weight=before, function=layer.norm) if before else x
    y = body(flow, layer, y)
    if after:
        y = flow.norm(f"{name}_post_norm", y, weight=after, function=layer.norm)
    y = flow.dropout(f"{name}.dropout", y, layer.residual_dropout)
    if layer.scaled:
        y = flow.pointwise(f"{name}.scale", OpKind.SCALE, y)
    return flow.add(f"{name}.residual", x, y)


def _attention(flow: Flow, layer: Layer, x: str) -> str:
    core = layer.attention
    q, k, v = (_fused_qkv if layer.fused else _separate_qkv)(flow, layer, x)
    if layer.qk_norm:
        width = core.head_dim if layer.qk_norm == "head" else None
        q = flow.norm("attention.q_norm", q, weight="self_attn.q_norm", function=layer.norm, width=width)
        k = flow.norm("attention.k_norm", k, weight="self_attn.k_norm", function=layer.norm, width=width)
    if layer.rotary:
        q, k = rotate(flow, q, k, core.head_dim)
    y = flow.attention("attention.core", (q, k, v), core, function=layer.attention_function)
    return flow.linear(
        "attention.out", y, weight="self_attn.o_proj", d_in=core.num_heads * core.v_head_dim, d_out=layer.hidden,
        bias=layer.out_bias, split="row", units=core.num_heads,
    )  # fmt: skip


def rotate(flow: Flow, q: str, k: str, width: int) -> tuple[str, str]:
    """Turn q and k by their positions; the tables are the embedding's, counted there."""
    for name in ("cos", "sin"):
        flow.value(name, width, batch_power=0, alias=f"embedding/{name}")
    outputs = flow.like("attention.q_rope", q), flow.like("attention.k_rope", k)
    flow.op("attention.rope", OpKind.ROPE, (q, k, "cos", "sin"), outputs, function="rotate_half")
    return outputs


def _separate_qkv(flow: Flow, layer: Layer, x: str) -> tuple[str, str, str]:
    core = layer.attention
    sizes = (("q", core.num_heads, core.head_dim), ("k", core.num_kv_heads, core.head_dim),
             ("v", core.num_kv_heads, core.v_head_dim))  # fmt: skip
    q, k, v = (
        flow.linear(
            f"attention.{n}", x, weight=f"self_attn.{n}_proj", d_in=layer.hidden, d_out=heads * dim,
            bias=layer.qkv_bias, split="column", units=heads,
        )
        for n, heads, dim in sizes
    )  # fmt: skip
    return q, k, v


def _fused_qkv(flow: Flow, layer: Layer, x: str) -> tuple[str, str, str]:
    core = layer.attention
    width = (core.num_heads + 2 * core.num_kv_heads) * core.head_dim
    qkv = flow.linear(
        "attention.qkv", x, weight="self_attn.qkv_proj", d_in=layer.hidden, d_out=width, bias=layer.qkv_bias,
        split="column", units=core.num_kv_heads,
    )  # fmt: skip
    return slices(flow, qkv, core)


def slices(flow: Flow, qkv: str, core: Attention) -> tuple[str, str, str]:
    """Views of a fused projection's output."""
    split = flow.values[qkv].split
    q, k, v = (
        flow.value(f"attention.{n}", heads * core.head_dim, split=split, alias=qkv)
        for n, heads in (("q", core.num_heads), ("k", core.num_kv_heads), ("v", core.num_kv_heads))
    )
    return q, k, v


def _mlp(flow: Flow, layer: Layer, x: str) -> str:
    if layer.mlp is not None:
        return layer.mlp(flow, x)
    return gated_mlp(
        flow, x, width=layer.hidden, inner=layer.intermediate, activation=layer.activation, bias=layer.mlp_bias,
        fused=layer.fused,
    )  # fmt: skip


def gated_mlp(
    flow: Flow, x: str, *, width: int, inner: int, activation: str, bias: bool = False, fused: bool = False,
    name: str = "mlp", weight: str = "mlp",
) -> str:  # fmt: skip
    """down(act(gate(x)) * up(x))."""
    if fused:
        both = flow.linear(
            f"{name}.gate_up", x, weight=f"{weight}.gate_up_proj", d_in=width, d_out=2 * inner, bias=bias,
            split="column",
        )  # fmt: skip
        split = flow.values[both].split
        gate, up = (flow.value(f"{name}.{n}", inner, split=split, alias=both) for n in ("gate", "up"))
    else:
        gate, up = (
            flow.linear(
                f"{name}.{n}", x, weight=f"{weight}.{n}_proj", d_in=width, d_out=inner, bias=bias, split="column"
            )
            for n in ("gate", "up")
        )
    gate = flow.pointwise(f"{name}.activation", OpKind.ACTIVATION, gate, function=activation)
    product = flow.pointwise(f"{name}.product", OpKind.MULTIPLY, gate, up)
    return flow.linear(
        f"{name}.down", product, weight=f"{weight}.down_proj", d_in=inner, d_out=width, bias=bias, split="row"
    )


def build(stem: Stem, layers: list[Layer]) -> Model:
    """The model of these layers; equal layers share one block."""
    blocks: dict[int, Block] = {}
    for layer in layers:
        if id(layer) not in blocks:
            name = "moe" if layer.mlp is not None else "decoder"
            blocks[id(layer)] = decoder_layer(layer, prefix=f"{stem.base}layers.{{}}.", name=name)
    return assemble(stem, [blocks[id(layer)] for layer in layers])
