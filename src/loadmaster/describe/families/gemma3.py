"""Gemma 3 with eyes: a SigLIP vision tower and a projector before the text decoder; one image a sample.

The tower's layers are the model's encoder, run on one image for each sample; where a run trains on text alone they
are weights that take no gradient.
"""

from __future__ import annotations

from dataclasses import replace

from loadmaster.describe.families.classic import attend, layer_norm, plain_mlp, separate_qkv
from loadmaster.describe.families.decoder import build
from loadmaster.describe.families.fields import Fields
from loadmaster.describe.families.flow import Flow
from loadmaster.describe.families.llama import KINDS, read_layers, read_stem
from loadmaster.describe.families.stem import in_runs, table
from loadmaster.describe.model import Block, Model
from loadmaster.describe.op import Attention, OpKind, Split, Weight

__all__ = ["gemma3"]

# of a text_config that leaves them out, as the published ones of 4b do
TEXT_DEFAULTS = {"vocab_size": 262208, "num_attention_heads": 8}


def gemma3(fields: Fields, *, name: str, model_type: str, with_head: bool) -> Model:
    """Gemma3ForConditionalGeneration, or Gemma3Model without the head."""
    given = fields.mapping("text_config")
    text = Fields({**TEXT_DEFAULTS, **given.raw}, where=given.where)
    vision = fields.mapping("vision_config")
    kind, base = KINDS["gemma3_text"], "model." if with_head else ""
    stem = replace(
        read_stem(text, kind, name=name, model_type=model_type, with_head=with_head), base=f"{base}language_model.",
        tied=fields.flag("tie_word_embeddings", True),
    )  # fmt: skip
    model = build(stem, read_layers(text, kind))
    tower = [_vision_layer(vision, f"{base}vision_tower.encoder.layers.{{}}.")] * vision.layers()
    eyes = _before_text(fields, vision, base, stem.hidden)
    return replace(
        model, embedding=_joined(eyes, model.embedding), blocks=(*in_runs(tower), *model.blocks),
        encoder_seq_len=_patches(vision),
    )  # fmt: skip


def _patches(vision: Fields) -> int:
    image, patch = vision.count("image_size", 224), vision.count("patch_size", 16)
    if patch > image:
        vision.refuse("patch_size", patch, f"must not exceed the image of {image}", "use smaller patches")
    return (image // patch) ** 2


def _before_text(fields: Fields, vision: Fields, base: str, text_hidden: int) -> Flow:
    """Patches and their positions; after the tower its last norm, its pooling head, the projector."""
    hidden, patches, tower = vision.count("hidden_size"), _patches(vision), f"{base}vision_tower."
    image, patch, channels = (
        vision.count("image_size", 224),
        vision.count("patch_size", 16),
        vision.count("num_channels", 3),
    )
    flow = Flow("embedding", "", width=None)
    flow.value("pixels", channels * image * image, seq_power=0)
    flow.value("patches", hidden * patches, seq_power=0)
    kernel = (
        Weight(
            name=f"{tower}embeddings.patch_embedding.weight", shape=(hidden, channels, patch, patch), multiplies=True
        ),
        Weight(name=f"{tower}embeddings.patch_embedding.bias", shape=(hidden,)),
    )
    flow.op("patches", OpKind.CONV, ("pixels",), ("patches",), weights=kernel)
    flow.value("patch_positions", hidden * patches, batch_power=0, seq_power=0)
    positions = (table(f"{tower}embeddings.position_embedding.weight", patches, hidden),)
    flow.op("patch_positions", OpKind.POSITION, (), ("patch_positions",), weights=positions)
    flow.add("patches.sum", "patches", "patch_positions")
    flow.value("encoder.last", hidden * patches, seq_power=0)
    norm = tuple(Weight(name=f"{tower}post_layernorm.{part}", shape=(hidden,)) for part in ("weight", "bias"))
    flow.value("encoder.output", hidden * patches, seq_power=0)
    flow.op("encoder.final_norm", OpKind.NORM, ("encoder.last",), ("encoder.output",), weights=norm, function="layer")
    if vision.flag("vision_use_head", True):
        _pooling_head(flow, vision, f"{tower}head.")
    _projector(fields, flow, f"{base}multi_modal_projector.", hidden, text_hidden)
    return flow


def _pooling_head(flow: Flow, vision: Fields, prefix: str) -> None:
    """Attention pooling; its output enters no loss of the language model."""
    hidden, inner = vision.count("hidden_size"), vision.count("intermediate_size")
    shapes = {
        "probe": (1, 1, hidden), "attention.in_proj_weight": (3 * hidden, hidden),
        "attention.in_proj_bias": (3 * hidden,), "attention.out_proj.weight": (hidden, hidden),
        "attention.out_proj.bias": (hidden,), "layernorm.weight": (hidden,), "layernorm.bias": (hidden,),
        "mlp.fc1.weight": (inner, hidden), "mlp.fc1.bias": (inner,), "mlp.fc2.weight": (hidden, inner),
        "mlp.fc2.bias": (hidden,),
    }  # fmt: skip
    flow.value("vision.pooled", hidden, seq_power=0)
    weights = tuple(Weight(name=prefix + name, shape=shape) for name, shape in shapes.items())
    flow.op("vision.pooled", OpKind.POOL, ("encoder.output",), ("vision.pooled",), weights=weights)


def _projector(fields: Fields, flow: Flow, prefix: str, hidden: int, text_hidden: int) -> None:
    """Average the patches down to mm_tokens_per_image, norm them, project them to the text's width."""
    tokens = fields.count("mm_tokens_per_image", 256)
    for name, width in (("image.pooled", hidden), ("image.normed", hidden), ("image.tokens", text_hidden)):
        flow.value(name, width * tokens, seq_power=0)
    flow.op("image.pooled", OpKind.POOL, ("encoder.output",), ("image.pooled",), function="average")
    norm = (Weight(name=f"{prefix}mm_soft_emb_norm.weight", shape=(hidden,)),)
    flow.op("image.normed", OpKind.NORM, ("image.pooled",), ("image.normed",), weights=norm, function="rms_unit")
    matrix = (Weight(name=f"{prefix}mm_input_projection_weight", shape=(hidden, text_hidden), multiplies=True),)
    flow.op("image.tokens", OpKind.MATMUL, ("image.normed",), ("image.tokens",), weights=matrix)


def _joined(eyes: Flow, embedding: Block) -> Block:
    """One embedding block of both, weights under their full names; image tokens take their places among words."""
    ops = tuple(
        replace(op, weights=tuple(replace(w, name=embedding.prefix + w.name) for w in op.weights))
        for op in embedding.ops
    )
    eyes.ops += ops
    eyes.values |= {v.name: v for v in embedding.values}
    eyes.value("embedded", embedding.value(embedding.output).width, split=Split.SEQUENCE)
    eyes.op("embedded", OpKind.OTHER, (embedding.output, "image.tokens"), ("embedded",), function="scatter")
    return eyes.done("embedded", input="input_ids")


def _vision_layer(vision: Fields, prefix: str) -> Block:
    """A SigLIP layer: norms before each branch, biases everywhere."""
    hidden, num_heads = vision.count("hidden_size"), vision.count("num_attention_heads", 12)
    head_dim = vision.divides("num_attention_heads", num_heads, "hidden_size", hidden)
    core = Attention(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, v_head_dim=head_dim, causal=False,
        dropout=vision.rate("attention_dropout"),
    )  # fmt: skip
    flow = Flow("encoder", prefix, width=hidden)
    y = layer_norm(flow, "attention_norm", "input", "layer_norm1")
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv = separate_qkv(flow, y, core, weights=names, bias=(True, True, True), width=hidden)
    x = flow.add("attention.residual", "input", attend(flow, qkv, core, weight="self_attn.out_proj", width=hidden))
    y = layer_norm(flow, "mlp_norm", x, "layer_norm2")
    y = plain_mlp(
        flow, y, width=hidden, inner=vision.count("intermediate_size"), up="mlp.fc1", down="mlp.fc2",
        activation=vision.text("hidden_act", "gelu_pytorch_tanh"),
    )  # fmt: skip
    return flow.done(flow.add("mlp.residual", x, y))
