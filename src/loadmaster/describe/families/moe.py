"""Experts: a router scores them, each token visits top_k, their outputs are summed by weight; Mixtral and Qwen MoE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from loadmaster.describe.families.decoder import Layer, build, gated_mlp
from loadmaster.describe.families.fields import Fields
from loadmaster.describe.families.flow import Flow
from loadmaster.describe.families.llama import Kind, read_layers, read_stem
from loadmaster.describe.model import Model
from loadmaster.describe.op import OpKind, Split, ValueType, Weight

__all__ = ["ALIASES", "Experts", "experts_mlp", "mixtral", "qwen_moe", "read_experts"]

ALIASES = {"num_experts": ("num_local_experts", "n_routed_experts")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Shape of a mixture layer.

    Attributes:
        hidden, inner: widths of the stream and inside one expert.
        num_experts, top_k: of routed experts, and how many of them a token visits.
        shared: width inside the shared expert that every token visits (0: none); shared_name: its module.
        gated_share: the shared expert's output is scaled by a learned gate (Qwen2-MoE).
        correction_bias: a buffer of one number an expert steers the choice (DeepSeek-V3).
        mlp_bias: the shared expert's matrices have biases.
    """

    hidden: int
    inner: int
    num_experts: int
    top_k: int
    shared: int = 0
    shared_name: str = "shared_experts"
    gated_share: bool = False
    correction_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"


def read_experts(fields: Fields, *, inner: str, num_experts: int | None = None, top_k: int | None = None) -> Experts:
    """The fields that every mixture has; the numbers are defaults."""
    total = fields.count("num_experts", num_experts) if num_experts else fields.count("num_experts")
    chosen = fields.count("num_experts_per_tok", top_k) if top_k else fields.count("num_experts_per_tok")
    if chosen > total:
        fields.refuse("num_experts_per_tok", chosen, f"must not exceed the {total} experts", f"use 1 to {total}")
    return Experts(
        hidden=fields.count("hidden_size"), inner=fields.count(inner), num_experts=total, top_k=chosen,
        activation=fields.text("hidden_act", "silu"),
    )  # fmt: skip


def experts_mlp(shape: Experts) -> Callable[[Flow, str], str]:
    """Builds the mixture in the MLP's place."""
    return lambda flow, x: _mixture(flow, x, shape)


def _mixture(flow: Flow, x: str, e: Experts) -> str:
    weights, indices = _route(flow, x, e)
    flow.value("experts.input", e.top_k * e.hidden)
    flow.op("experts.dispatch", OpKind.DISPATCH, (x, indices), ("experts.input",))
    y = _routed(flow, "experts.input", e)
    flow.like("experts.output", x)
    y = flow.op("experts.combine", OpKind.COMBINE, (y, weights, indices), ("experts.output",))
    if not e.shared:
        return y
    shared = gated_mlp(
        flow, x, width=e.hidden, inner=e.shared, activation=e.activation, name="shared", bias=e.mlp_bias,
        weight=f"mlp.{e.shared_name}",
    )  # fmt: skip
    if e.gated_share:
        gate = flow.linear("shared.gate_score", x, weight="mlp.shared_expert_gate", d_in=e.hidden, d_out=1)
        gate = flow.pointwise("shared.sigmoid", OpKind.ACTIVATION, gate, function="sigmoid")
        shared = flow.pointwise("shared.scaled", OpKind.MULTIPLY, shared, gate)
    return flow.add("experts.sum", y, shared)


def _route(flow: Flow, x: str, e: Experts) -> tuple[str, str]:
    """Scores in fp32, the top_k of them with their indices."""
    gate = [Weight(name="mlp.gate.weight", shape=(e.num_experts, e.hidden), multiplies=True)]
    if e.correction_bias:
        gate.append(Weight(name="mlp.gate.e_score_correction_bias", shape=(e.num_experts,), trainable=False))
    flow.value("router.scores", e.num_experts, type=ValueType.FP32)
    flow.value("router.weights", e.top_k, type=ValueType.FP32)
    flow.value("router.indices", e.top_k, type=ValueType.INT64)
    outputs = ("router.scores", "router.weights", "router.indices")
    flow.op("router", OpKind.ROUTER, (x,), outputs, weights=tuple(gate), function="softmax_top_k")
    return outputs[1], outputs[2]


def _routed(flow: Flow, x: str, e: Experts) -> str:
    """The grouped gated MLP; all experts of a matrix are one parameter."""

    def stacked(name: str, shape: tuple[int, int], dim: int) -> tuple[Weight]:
        return (
            Weight(
                name=f"mlp.experts.{name}", shape=shape, num_experts=e.num_experts, top_k=e.top_k, stacked=True,
                multiplies=True, split=Split.TP, split_dim=dim,
            ),
        )  # fmt: skip

    both = flow.value("experts.gate_up", e.top_k * 2 * e.inner, split=Split.TP)
    weights = stacked("gate_up_proj", (2 * e.inner, e.hidden), 0)
    flow.op("experts.gate_up", OpKind.MATMUL, (x,), (both,), weights=weights, function="grouped")
    gate, up = (flow.value(f"experts.{n}", e.top_k * e.inner, split=Split.TP, alias=both) for n in ("gate", "up"))
    gate = flow.pointwise("experts.activation", OpKind.ACTIVATION, gate, function=e.activation)
    product = flow.pointwise("experts.product", OpKind.MULTIPLY, gate, up)
    y = flow.value("experts.down", e.top_k * e.hidden)
    weights = stacked("down_proj", (e.hidden, e.inner), 1)
    return flow.op("experts.down", OpKind.MATMUL, (product,), (y,), weights=weights, function="grouped")


MIXTRAL = Kind(qkv_bias=False, out_bias=False, kv_heads=8, windowed="always")
QWEN3_MOE = Kind(kv_heads=4, windowed="if_used", window=4096, qk_norm="head")
QWEN2_MOE = Kind(qkv_bias=True, out_bias=False, kv_heads=16, windowed="alternate_below", window=4096)


def mixtral(fields: Fields, *, name: str, model_type: str, with_head: bool) -> Model:
    """Mixtral: experts in every layer."""
    experts = read_experts(fields, inner="intermediate_size", num_experts=8, top_k=2)
    return _build(fields, MIXTRAL, lambda index: experts, name=name, model_type=model_type, with_head=with_head)


def qwen_moe(fields: Fields, *, name: str, model_type: str, with_head: bool) -> Model:
    """Qwen 2 and 3 MoE: experts in every decoder_sparse_step-th layer that mlp_only_layers does not name."""
    old = model_type == "qwen2_moe"
    experts = read_experts(fields, inner="moe_intermediate_size")
    kind = QWEN3_MOE
    if old:
        kind = replace(QWEN2_MOE, qkv_bias=fields.flag("qkv_bias", True))
        experts = replace(
            experts, shared=fields.count("shared_expert_intermediate_size", 5632), shared_name="shared_expert",
            gated_share=True,
        )  # fmt: skip
    step = fields.count("decoder_sparse_step", 1)
    dense = fields.integers("mlp_only_layers") or ()

    def at(index: int) -> Experts | None:
        return None if index in dense or (index + 1) % step else experts

    return _build(fields, kind, at, name=name, model_type=model_type, with_head=with_head)


def _build(
    fields: Fields, kind: Kind, at: Callable[[int], Experts | None], *, name: str, model_type: str, with_head: bool
) -> Model:
    sparse: dict[tuple[int, int], Layer] = {}

    def layer(index: int, dense: Layer) -> Layer:
        experts = at(index)
        if experts is None:
            return dense
        key = (id(dense), id(experts))
        if key not in sparse:
            sparse[key] = replace(dense, mlp=experts_mlp(experts))
        return sparse[key]

    layers = [layer(i, dense) for i, dense in enumerate(read_layers(fields, kind))]
    return build(read_stem(fields, kind, name=name, model_type=model_type, with_head=with_head), layers)
