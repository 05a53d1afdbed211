"""Whisper: two convolutions over a spectrogram, an encoder of fixed length, a decoder that attends to it."""

from __future__ import annotations

from dataclasses import replace

from loadmaster.describe.families.classic import attend, layer_norm, plain_mlp, separate_qkv
from loadmaster.describe.families.fields import Fields
from loadmaster.describe.families.flow import Flow
from loadmaster.describe.families.stem import in_runs, language_head, table, token_embedding
from loadmaster.describe.model import Block, Model
from loadmaster.describe.op import Attention, Op, OpKind, Split, Weight

__all__ = ["ALIASES", "whisper"]

ALIASES = {"hidden_size": ("d_model",)}
FRAMES_PER_POSITION = 2  # the second convolution has stride 2


def whisper(fields: Fields, *, name: str, model_type: str, with_head: bool) -> Model:
    """WhisperForConditionalGeneration, or WhisperModel without the head."""
    base = "model." if with_head else ""
    encoder = [_block(fields, base, "encoder")] * fields.layers("encoder_layers")
    decoder = [_block(fields, base, "decoder")] * fields.layers("decoder_layers")
    return Model(
        name=name, family=model_type, hidden_size=fields.count("hidden_size"), vocab_size=fields.count("vocab_size"),
        embedding=_embedding(fields, base), blocks=(*in_runs(encoder), *in_runs(decoder)),
        head=_head(fields, base, with_head), max_seq_len=fields.count("max_target_positions", 448),
        encoder_seq_len=_positions(fields),
    )  # fmt: skip


def _positions(fields: Fields) -> int:
    return fields.count("max_source_positions", 1500)


def _embedding(fields: Fields, base: str) -> Block:
    """Both sides' inputs; the encoder's final norm stands here too, being part of no layer."""
    hidden, bins, length = fields.count("hidden_size"), fields.count("num_mel_bins", 80), _positions(fields)
    rate = fields.rate("dropout")
    flow = Flow("embedding", base, width=None)
    frames = FRAMES_PER_POSITION * length
    flow.value("spectrogram", bins * frames, seq_power=0)
    x = _convolution(flow, "encoder.conv1", "spectrogram", bins, hidden, frames)
    x = _convolution(flow, "encoder.conv2", x, hidden, hidden, length)
    flow.value("encoder.positions", hidden * length, batch_power=0, seq_power=0)
    fixed = (table("encoder.embed_positions.weight", length, hidden, trainable=False),)
    flow.op("encoder.positions", OpKind.POSITION, (), ("encoder.positions",), weights=fixed)
    flow.dropout("encoder.dropout", flow.add("encoder.sum", x, "encoder.positions"), rate)
    flow.value("encoder.last", hidden * length, seq_power=0, split=Split.SEQUENCE)
    norm = (
        Weight(name="encoder.layer_norm.weight", shape=(hidden,)),
        Weight(name="encoder.layer_norm.bias", shape=(hidden,)),
    )
    flow.value("encoder.output", hidden * length, seq_power=0, split=Split.SEQUENCE)
    flow.op("encoder.final_norm", OpKind.NORM, ("encoder.last",), ("encoder.output",), weights=norm, function="layer")
    x = token_embedding(flow, "decoder.embed_tokens.weight", vocab_size=fields.count("vocab_size"), width=hidden)
    flow.value("positions", hidden, batch_power=0)
    learned = (table("decoder.embed_positions.weight", fields.count("max_target_positions", 448), hidden),)
    flow.op("positions", OpKind.POSITION, (), ("positions",), weights=learned)
    return flow.done(flow.dropout("tokens.dropout", flow.add("tokens.sum", x, "positions"), rate), input="input_ids")


def _convolution(flow: Flow, name: str, x: str, d_in: int, d_out: int, length: int) -> str:
    """gelu(conv(x)), kernel 3: 2 d_in d_out 3 FLOPs for each of the `length` columns it makes."""
    kernel = Weight(name=f"{name}.weight", shape=(d_out, d_in, 3), multiplies=True)
    weights = (kernel, Weight(name=f"{name}.bias", shape=(d_out,)))
    y = flow.value(name, d_out * length, seq_power=0)
    flops = 2.0 * kernel.numel * length
    flow.ops.append(Op(name=name, kind=OpKind.CONV, inputs=(x,), outputs=(y,), weights=weights, flops=flops))
    return flow.pointwise(f"{name}.activation", OpKind.ACTIVATION, y, function="gelu")


def _block(fields: Fields, base: str, side: str) -> Block:
    hidden, rate = fields.count("hidden_size"), fields.rate("dropout")
    heads_field = f"{side}_attention_heads"
    num_heads = fields.count(heads_field)
    head_dim = fields.divides(heads_field, num_heads, "d_model", hidden)
    core = Attention(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, v_head_dim=head_dim,
        causal=side == "decoder", dropout=fields.rate("attention_dropout"),
    )  # fmt: skip
    flow = Flow(side, f"{base}{side}.layers.{{}}.", width=hidden)
    x = _attention(flow, "input", core, "self_attn", hidden=hidden, rate=rate)
    if side == "decoder":
        length = _positions(fields)
        flow.value(
            "encoder.output", hidden * length, seq_power=0, split=Split.SEQUENCE, alias="embedding/encoder.output"
        )
        cross = replace(core, causal=False, cross_tokens=length)
        x = _attention(flow, x, cross, "encoder_attn", hidden=hidden, rate=rate, keys="encoder.output")
    y = layer_norm(flow, "mlp_norm", x, "final_layer_norm")
    y = plain_mlp(
        flow, y, width=hidden, inner=fields.count(f"{side}_ffn_dim"), up="fc1", down="fc2",
        activation=fields.text("activation_function", "gelu"), dropout=fields.rate("activation_dropout"),
    )  # fmt: skip
    return flow.done(flow.add("mlp.residual", x, flow.dropout("mlp.dropout", y, rate)))


def _attention(
    flow: Flow, x: str, core: Attention, module: str, *, hidden: int, rate: float, keys: str | None = None
) -> str:
    name = "cross" if keys else "attention"
    y = layer_norm(flow, f"{name}_norm", x, f"{module}_layer_norm")
    names = (f"{module}.q_proj", f"{module}.k_proj", f"{module}.v_proj")
    qkv = separate_qkv(
        flow, y, core, weights=names, bias=(True, False, True), width=hidden, keys=keys, name=name, scaled=True,
        keys_length=core.cross_tokens,
    )  # fmt: skip
    y = attend(flow, qkv, core, weight=f"{module}.out_proj", width=hidden, name=name)
    return flow.add(f"{name}.residual", x, flow.dropout(f"{name}.dropout", y, rate))


def _head(fields: Fields, base: str, with_head: bool) -> Block:
    hidden = fields.count("hidden_size")
    flow = Flow("head", "", width=hidden)
    x = layer_norm(flow, "final_norm", "input", f"{base}decoder.layer_norm")
    if with_head:
        x = language_head(
            flow, x, weight="proj_out", width=hidden, vocab_size=fields.count("vocab_size"),
            tied_to=f"{base}decoder.embed_tokens.weight" if fields.flag("tie_word_embeddings", True) else None,
        )  # fmt: skip
    return flow.done(x)
