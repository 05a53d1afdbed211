"""Pieces of the models before Llama: layer norms with bias, fused or separate qkv, a two-matrix MLP."""

from __future__ import annotations

from loadmaster.describe.families.decoder import rotate, slices
from loadmaster.describe.families.fields import Fields
from loadmaster.describe.families.flow import Flow
from loadmaster.describe.op import Attention, OpKind

__all__ = ["attend", "fused_qkv", "layer_norm", "plain_mlp", "separate_qkv", "whole_heads"]


def whole_heads(fields: Fields, *, dropout: float, causal: bool = True, bias: bool = False) -> Attention:
    """Multi-head attention with head_dim = hidden_size / heads."""
    num_heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
    head_dim = fields.divides("num_attention_heads", num_heads, "hidden_size", hidden)
    return Attention(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, v_head_dim=head_dim, causal=causal,
        dropout=dropout, bias=bias,
    )  # fmt: skip


def layer_norm(flow: Flow, name: str, x: str, weight: str, *, bias: bool = True, affine: bool = True) -> str:
    """LayerNorm."""
    return flow.norm(name, x, weight=weight, function="layer", bias=bias and affine, affine=affine)


def fused_qkv(
    flow: Flow, x: str, core: Attention, *, width: int, weight: str, bias: bool, transposed: bool = False
) -> tuple[str, str, str]:
    """q, k, v as views of one projection."""
    qkv = flow.linear(
        "attention.qkv", x, weight=weight, d_in=width, d_out=(core.num_heads + 2 * core.num_kv_heads) * core.head_dim,
        bias=bias, split="column", units=core.num_kv_heads, transposed=transposed,
    )  # fmt: skip
    return slices(flow, qkv, core)


def separate_qkv(
    flow: Flow, x: str, core: Attention, *, weights: tuple[str, str, str], bias: tuple[bool, bool, bool], width: int,
    keys: str | None = None, keys_length: int | None = None, name: str = "attention", scaled: bool = False,
) -> tuple[str, str, str]:  # fmt: skip
    """q from x, k and v from `keys` (x itself where None); `scaled`: q is multiplied by a constant at once.

    `keys_length` is the fixed number of tokens of `keys`, whose value then counts all of them in its width.
    """
    source = (x, keys or x, keys or x)
    parts = zip(("q", "k", "v"), source, weights, bias, strict=True)
    q, k, v = (
        flow.linear(
            f"{name}.{part}", s, weight=w, d_in=width, d_out=core.num_heads * core.head_dim, bias=b, split="column",
            units=core.num_heads, length=keys_length if part != "q" else None,
        )
        for part, s, w, b in parts
    )  # fmt: skip
    if scaled:
        q = flow.pointwise(f"{name}.q_scale", OpKind.SCALE, q)
    return q, k, v


def attend(
    flow: Flow, qkv: tuple[str, str, str], core: Attention, *, weight: str, width: int, bias: bool = True,
    rope_width: int = 0, transposed: bool = False, function: str = "sdpa", name: str = "attention",
    extra: tuple[str, ...] = (),
) -> str:  # fmt: skip
    """Attention core and output projection."""
    q, k, v = qkv
    if rope_width:
        q, k = rotate(flow, q, k, rope_width)
    y = flow.attention(f"{name}.core", (q, k, v, *extra), core, function=function)
    return flow.linear(
        f"{name}.out", y, weight=weight, d_in=core.num_heads * core.v_head_dim, d_out=width, bias=bias, split="row",
        units=core.num_heads, transposed=transposed,
    )  # fmt: skip


def plain_mlp(
    flow: Flow, x: str, *, width: int, inner: int, up: str, down: str, activation: str, bias: bool = True,
    transposed: bool = False, dropout: float = 0.0, name: str = "mlp",
) -> str:  # fmt: skip
    """down(dropout(act(up(x))))."""
    y = flow.linear(
        f"{name}.up", x, weight=up, d_in=width, d_out=inner, bias=bias, split="column", transposed=transposed
    )
    y = flow.pointwise(f"{name}.activation", OpKind.ACTIVATION, y, function=activation)
    y = flow.dropout(f"{name}.activation_dropout", y, dropout)
    return flow.linear(
        f"{name}.down", y, weight=down, d_in=inner, d_out=width, bias=bias, split="row", transposed=transposed
    )
