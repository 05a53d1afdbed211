"""Megatron-LM's GPT as its own tests run it: learned or rotary positions, grouped queries, plain experts."""

from __future__ import annotations

from dataclasses import dataclass

from loadmaster.describe.families.classic import attend, fused_qkv, layer_norm, plain_mlp
from loadmaster.describe.families.flow import Flow
from loadmaster.describe.families.stem import Stem, assemble
from loadmaster.describe.model import Block, Model
from loadmaster.describe.op import Attention, OpKind, Split, ValueType, Weight

__all__ = ["MegatronGpt", "megatron_gpt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronGpt:
    """Shape.

    Attributes:
        ffn: width inside the MLP, or inside one expert; num_experts: 0 for a dense model.
        bias: linear layers have one; rotary: positions turn q and k, else a learned table of `positions` rows.
        dropout: rate on the stream and on attention.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab_size: int
    positions: int
    tied: bool = True
    num_experts: int = 0
    top_k: int = 1
    bias: bool = True
    rotary: bool = False
    dropout: float = 0.1


def megatron_gpt(shape: MegatronGpt) -> Model:
    """The model's op table.

    >>> megatron_gpt(MegatronGpt(name="test", layers=2, hidden=64, heads=4, kv_heads=4, ffn=256, vocab_size=100,
    ...                          positions=32)).num_params
    108544
    """
    stem = Stem(
        name=shape.name, family="megatron_gpt", hidden=shape.hidden, vocab_size=shape.vocab_size, tied=shape.tied,
        base="", embed="word_embeddings", final_norm="final_layernorm", head="output_layer", norm="layer",
        norm_bias=True, positions=None if shape.rotary else ("position_embeddings", shape.positions),
        max_seq_len=shape.positions, embedding_dropout=shape.dropout,
        rope_width=shape.hidden // shape.heads if shape.rotary else 0,
    )  # fmt: skip
    return assemble(stem, [_block(shape)] * shape.layers)


def _block(shape: MegatronGpt) -> Block:
    head_dim = shape.hidden // shape.heads
    core = Attention(
        num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=head_dim, v_head_dim=head_dim,
        dropout=shape.dropout,
    )  # fmt: skip
    flow = Flow("moe" if shape.num_experts else "decoder", "layers.{}.", width=shape.hidden)
    y = layer_norm(flow, "attention_norm", "input", "input_layernorm")
    qkv = fused_qkv(flow, y, core, width=shape.hidden, weight="linear_qkv", bias=shape.bias)
    rope = head_dim if shape.rotary else 0
    y = attend(flow, qkv, core, weight="linear_proj", width=shape.hidden, bias=shape.bias, rope_width=rope)
    x = flow.add("attention.residual", "input", flow.dropout("attention.dropout", y, shape.dropout))
    y = layer_norm(flow, "mlp_norm", x, "pre_mlp_layernorm")
    y = _experts(flow, y, shape) if shape.num_experts else plain_mlp(
        flow, y, width=shape.hidden, inner=shape.ffn, up="linear_fc1", down="linear_fc2", activation="gelu",
        bias=shape.bias,
    )  # fmt: skip
    return flow.done(flow.add("mlp.residual", x, flow.dropout("mlp.dropout", y, shape.dropout)))


def _experts(flow: Flow, x: str, shape: MegatronGpt) -> str:
    """Router, and experts of two matrices without a gate."""

    def stacked(name: str, rows: int, columns: int, dim: int) -> tuple[Weight]:
        return (
            Weight(
                name=f"experts.{name}", shape=(rows, columns), num_experts=shape.num_experts, top_k=shape.top_k,
                stacked=True, multiplies=True, split=Split.TP, split_dim=dim,
            ),
        )  # fmt: skip

    gate = (Weight(name="router.weight", shape=(shape.num_experts, shape.hidden), multiplies=True),)
    flow.value("router.scores", shape.num_experts, type=ValueType.FP32)
    flow.value("router.weights", shape.top_k, type=ValueType.FP32)
    flow.value("router.indices", shape.top_k, type=ValueType.INT64)
    chosen = ("router.scores", "router.weights", "router.indices")
    flow.op("router", OpKind.ROUTER, (x,), chosen, weights=gate, function="softmax_top_k")
    flow.value("experts.input", shape.top_k * shape.hidden)
    flow.op("experts.dispatch", OpKind.DISPATCH, (x, "router.indices"), ("experts.input",))
    flow.value("experts.up", shape.top_k * shape.ffn, split=Split.TP)
    up = stacked("linear_fc1", shape.ffn, shape.hidden, 0)
    flow.op("experts.up", OpKind.MATMUL, ("experts.input",), ("experts.up",), weights=up, function="grouped")
    y = flow.pointwise("experts.activation", OpKind.ACTIVATION, "experts.up", function="gelu")
    flow.value("experts.down", shape.top_k * shape.hidden)
    down = stacked("linear_fc2", shape.hidden, shape.ffn, 1)
    flow.op("experts.down", OpKind.MATMUL, (y,), ("experts.down",), weights=down, function="grouped")
    flow.like("experts.output", x)
    inputs = ("experts.down", "router.weights", "router.indices")
    return flow.op("experts.combine", OpKind.COMBINE, inputs, ("experts.output",))
