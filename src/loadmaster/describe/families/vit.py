"""ViT: an image cut into patches, a class token, an encoder with norms before each branch, a class head."""

from __future__ import annotations

from typing import Any

from loadmaster.describe.families.classic import attend, layer_norm, plain_mlp, separate_qkv
from loadmaster.describe.families.fields import Fields
from loadmaster.describe.families.flow import Flow
from loadmaster.describe.families.stem import in_runs, token_loss
from loadmaster.describe.model import Block, Model
from loadmaster.describe.op import Attention, OpKind, Split, Weight

__all__ = ["vit"]


def vit(fields: Fields, *, name: str, model_type: str, with_head: bool) -> Model:
    """ViTForImageClassification, or ViTModel with its pooler."""
    base = "vit." if with_head else ""
    hidden = fields.count("hidden_size")
    tokens = _patches(fields) + 1
    return Model(
        name=name, family=model_type, hidden_size=hidden, vocab_size=max(_num_labels(fields), 1),
        embedding=_embedding(fields, base), blocks=in_runs([_block(fields, f"{base}layers.{{}}.")] * fields.layers()),
        head=_head(fields, base, with_head), max_seq_len=tokens, fixed_seq_len=tokens,
    )  # fmt: skip


def _pair(fields: Fields, name: str, default: int) -> tuple[int, int]:
    value: Any = fields.get(name, default)
    if isinstance(value, list | tuple):
        sides = fields.integers(name) or ()
        if len(sides) != 2 or min(sides) < 1:
            fields.refuse(name, value, "must be one size or two", "write e.g. 224 or [224, 224]")
        return sides[0], sides[1]
    side = fields.count(name, default)
    return side, side


def _patches(fields: Fields) -> int:
    image, patch = _pair(fields, "image_size", 224), _pair(fields, "patch_size", 16)
    if image[0] < patch[0] or image[1] < patch[1]:
        fields.refuse("patch_size", patch, f"must not exceed the image of {image}", "use smaller patches")
    return (image[0] // patch[0]) * (image[1] // patch[1])


def _num_labels(fields: Fields) -> int:
    """Classes: as named by id2label, as numbered by num_labels, or 2."""
    labels = fields.get("id2label")
    if isinstance(labels, dict) and not fields.has("num_labels"):
        return len(labels)
    return fields.count("num_labels", 2, minimum=0)


def _embedding(fields: Fields, base: str) -> Block:
    hidden, patch, channels = (
        fields.count("hidden_size"),
        _pair(fields, "patch_size", 16),
        fields.count("num_channels", 3),
    )
    image, patches = _pair(fields, "image_size", 224), _patches(fields)
    flow = Flow("embedding", f"{base}embeddings.", width=None)
    flow.value("pixels", channels * image[0] * image[1], seq_power=0)
    flow.value("patches", hidden * patches, seq_power=0)
    projection = "patch_embeddings.projection"
    kernel = (
        Weight(name=f"{projection}.weight", shape=(hidden, channels, *patch), multiplies=True),
        Weight(name=f"{projection}.bias", shape=(hidden,)),
    )
    flow.op("patches", OpKind.CONV, ("pixels",), ("patches",), weights=kernel)
    flow.value("tokens", hidden, split=Split.SEQUENCE)
    token = (Weight(name="cls_token", shape=(1, 1, hidden)),)
    flow.op("class_token", OpKind.OTHER, ("patches",), ("tokens",), weights=token, function="concatenate")
    flow.value("positions", hidden, batch_power=0)
    table = (Weight(name="position_embeddings", shape=(1, patches + 1, hidden)),)
    flow.op("positions", OpKind.POSITION, (), ("positions",), weights=table)
    x = flow.add("tokens.sum", "tokens", "positions")
    return flow.done(flow.dropout("tokens.dropout", x, fields.rate("hidden_dropout_prob")), input="pixels")


def _block(fields: Fields, prefix: str) -> Block:
    hidden, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    head_dim = fields.optional_count("head_dim")
    head_dim = head_dim or fields.divides("num_attention_heads", num_heads, "hidden_size", hidden)
    rate, biased = fields.rate("hidden_dropout_prob"), fields.flag("qkv_bias", True)
    core = Attention(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, v_head_dim=head_dim, causal=False,
        dropout=fields.rate("attention_probs_dropout_prob"),
    )  # fmt: skip
    flow = Flow("encoder", prefix, width=hidden)
    y = layer_norm(flow, "attention_norm", "input", "layernorm_before")
    names = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
    qkv = separate_qkv(flow, y, core, weights=names, bias=(biased, biased, biased), width=hidden)
    y = attend(flow, qkv, core, weight="attention.o_proj", width=hidden)
    x = flow.add("attention.residual", flow.dropout("attention.dropout", y, rate), "input")
    y = layer_norm(flow, "mlp_norm", x, "layernorm_after")
    y = plain_mlp(
        flow, y, width=hidden, inner=fields.count("intermediate_size"), up="mlp.fc1", down="mlp.fc2",
        activation=fields.text("hidden_act", "gelu"),
    )  # fmt: skip
    return flow.done(flow.add("mlp.residual", flow.dropout("mlp.dropout", y, rate), x))


def _head(fields: Fields, base: str, with_head: bool) -> Block:
    hidden = fields.count("hidden_size")
    flow = Flow("head", "", width=hidden)
    x = layer_norm(flow, "final_norm", "input", f"{base}layernorm")
    flow.value("first", hidden, seq_power=0)
    flow.op("first", OpKind.POOL, (x,), ("first",), function="first")
    if not with_head:
        width = fields.count("pooler_output_size", hidden)
        x = flow.linear("pooler", "first", weight="pooler.dense", d_in=hidden, d_out=width, bias=True)
        return flow.done(flow.pointwise("pooler.activation", OpKind.ACTIVATION, x, function="tanh"))
    classes = _num_labels(fields)
    if not classes:
        return flow.done("first")
    x = flow.linear("logits", "first", weight="classifier", d_in=hidden, d_out=classes, bias=True)
    return flow.done(token_loss(flow, x))
