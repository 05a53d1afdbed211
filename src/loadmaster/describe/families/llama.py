"""Llama and its like, as a table of differences: Mistral, Qwen, SmolLM3, Granite, OLMo 2, Phi-3, Gemma."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from loadmaster.describe.families.decoder import Layer, build
from loadmaster.describe.families.fields import Fields
from loadmaster.describe.families.stem import Stem
from loadmaster.describe.model import Model
from loadmaster.describe.op import Attention

__all__ = ["KINDS", "Kind", "heads", "llama_like", "read_layers", "read_stem", "windows"]

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How a model type differs from Llama.

    Attributes:
        qkv_bias, out_bias: fixed by the architecture; None: as ``attention_bias`` says.
        mlp_bias: the field of that name is read.
        head_dim: default of the field; None: hidden_size / heads. whole_heads: heads must divide hidden_size always.
        kv_heads: default of num_key_value_heads; None: as many as heads.
        tied: default of tie_word_embeddings.
        windowed: which layers slide, see `windows`; window: default of sliding_window.
        activation_field, activation: the gate's activation and its default.
        others: as `Layer`'s and `Stem`'s.
    """

    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool = False
    head_dim: int | None = None
    whole_heads: bool = False
    kv_heads: int | None = None
    tied: bool = False
    windowed: Literal["never", "always", "above", "no_rope", "pattern", "if_used", "alternate_below"] = "never"
    window: int | None = None
    pattern: int = 2
    activation_field: str = "hidden_act"
    activation: str = "silu"
    qk_norm: Literal["", "head", "full"] = ""
    placement: Literal["pre", "post", "sandwich"] = "pre"
    norm: str = "rms"
    fused: bool = False
    scaled: bool = False
    embedding_scale: bool = False
    attention_softcap: float | None = None
    final_softcap: float | None = None


_GEMMA = Kind(
    head_dim=256, tied=True, activation_field="hidden_activation", activation="gelu_pytorch_tanh", norm="rms_unit",
    embedding_scale=True, placement="sandwich", windowed="pattern", window=4096, kv_heads=4, whole_heads=True,
)  # fmt: skip
KINDS = {
    "llama": Kind(mlp_bias=True, whole_heads=True),
    "mistral": Kind(qkv_bias=False, out_bias=False, kv_heads=8, windowed="always", window=4096),
    "qwen2": Kind(qkv_bias=True, out_bias=False, kv_heads=32, windowed="above", window=4096),
    "qwen3": Kind(kv_heads=32, head_dim=128, windowed="above", window=4096, qk_norm="head"),
    "smollm3": Kind(mlp_bias=True, kv_heads=4, tied=True, windowed="no_rope"),
    "granite": Kind(mlp_bias=True, scaled=True, embedding_scale=True),
    "olmo2": Kind(qk_norm="full", placement="post", norm="rms_fp32"),
    "phi3": Kind(qkv_bias=False, out_bias=False, windowed="always", fused=True),
    "gemma": replace(
        _GEMMA, placement="pre", windowed="never", kv_heads=16, activation_field="hidden_act",
    ),
    "gemma2": replace(_GEMMA, attention_softcap=50.0, final_softcap=30.0),
    "gemma3_text": replace(_GEMMA, qk_norm="head", pattern=6),
}  # fmt: skip


def llama_like(fields: Fields, *, name: str, model_type: str, with_head: bool) -> Model:
    """The model of one of `KINDS`."""
    kind = KINDS[model_type]
    return build(
        read_stem(fields, kind, name=name, model_type=model_type, with_head=with_head), read_layers(fields, kind)
    )


def heads(fields: Fields, kind: Kind) -> tuple[int, int, int]:
    """Query heads, KV heads, head_dim."""
    hidden = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    default = kind.kv_heads if "num_key_value_heads" not in fields.raw and kind.kv_heads else num_heads
    num_kv_heads = fields.count("num_key_value_heads", default)
    fields.divides("num_key_value_heads", num_kv_heads, "num_attention_heads", num_heads)
    head_dim = fields.optional_count("head_dim") or kind.head_dim
    if head_dim is None or kind.whole_heads:
        whole = fields.divides("num_attention_heads", num_heads, "hidden_size", hidden)
        head_dim = head_dim or whole
    return num_heads, num_kv_heads, head_dim


def windows(fields: Fields, kind: Kind, num_layers: int) -> tuple[int | None, ...]:
    """Keys a query sees at most, layer by layer; None: all."""
    window = fields.optional_count("sliding_window")
    if "sliding_window" not in fields.raw:
        window = kind.window
    kinds = None
    if kind.windowed in ("above", "no_rope", "pattern", "alternate_below"):
        kinds = fields.words("layer_types", num_layers, (FULL, SLIDING))
    if kind.windowed in ("above", "no_rope", "if_used", "alternate_below") and not fields.flag(
        "use_sliding_window", False
    ):
        window = None
    if kinds is None:
        kinds = tuple(SLIDING if _slides(fields, kind, i) else FULL for i in range(num_layers))
    return tuple(window if k == SLIDING else None for k in kinds)


def _slides(fields: Fields, kind: Kind, index: int) -> bool:
    match kind.windowed:
        case "always" | "if_used":
            return True
        case "above":
            return index >= fields.count("max_window_layers", 28, minimum=0)
        case "alternate_below":
            return index % 2 == 0 and index < fields.count("max_window_layers", 28, minimum=0)
        case "no_rope":
            return not _rotary(fields, kind, index)
        case "pattern":
            period = fields.count("sliding_window_pattern", kind.pattern) if kind.pattern != 2 else 2
            return (index + 1) % period != 0
        case _:
            return False


def _rotary(fields: Fields, kind: Kind, index: int) -> bool:
    """SmolLM3 leaves positions out of every fourth layer."""
    if kind.windowed != "no_rope":
        return True
    marks = fields.integers("no_rope_layers")
    if marks is not None:
        if len(marks) <= index:
            fields.refuse("no_rope_layers", list(marks), "must list every layer", "complete the list")
        return bool(marks[index])
    return (index + 1) % fields.count("no_rope_layer_interval", 4) != 0


def read_layers(fields: Fields, kind: Kind) -> list[Layer]:
    """One `Layer` a layer; equal ones are the same object."""
    num_layers = fields.layers()
    num_heads, num_kv_heads, head_dim = heads(fields, kind)
    biased = fields.flag("attention_bias", False)
    softcap = fields.number("attn_logit_softcapping", kind.attention_softcap) if kind.norm == "rms_unit" else None
    if "attn_logit_softcapping" in fields.raw and not fields.has("attn_logit_softcapping"):
        softcap = None
    core = Attention(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=head_dim,
        dropout=fields.rate("attention_dropout"), softcap=softcap,
    )  # fmt: skip
    first = Layer(
        hidden=fields.count("hidden_size"), intermediate=fields.count("intermediate_size"), attention=core,
        qkv_bias=biased if kind.qkv_bias is None else kind.qkv_bias,
        out_bias=biased if kind.out_bias is None else kind.out_bias,
        mlp_bias=kind.mlp_bias and fields.flag("mlp_bias", False),
        qk_norm=kind.qk_norm, placement=kind.placement, norm=kind.norm, fused=kind.fused, scaled=kind.scaled,
        residual_dropout=fields.rate("resid_pdrop") if kind.fused else 0.0,
        activation=fields.text(kind.activation_field, kind.activation),
        attention_function="eager" if softcap else "sdpa_copied" if kind.fused else "sdpa",
    )  # fmt: skip
    return _shared(first, windows(fields, kind, num_layers), [_rotary(fields, kind, i) for i in range(num_layers)])


def _shared(first: Layer, sizes: tuple[int | None, ...], rotary: list[bool]) -> list[Layer]:
    made: dict[tuple[int | None, bool], Layer] = {}
    for key in zip(sizes, rotary, strict=True):
        if key not in made:
            made[key] = replace(first, attention=replace(first.attention, window=key[0]), rotary=key[1])
    return [made[key] for key in zip(sizes, rotary, strict=True)]


def read_stem(fields: Fields, kind: Kind, *, name: str, model_type: str, with_head: bool) -> Stem:
    """Embedding and head."""
    softcap = fields.number("final_logit_softcapping", kind.final_softcap) if kind.norm == "rms_unit" else None
    if "final_logit_softcapping" in fields.raw and not fields.has("final_logit_softcapping"):
        softcap = None
    head_dim = heads(fields, kind)[2]
    partial = fields.number("partial_rotary_factor", 1.0) or 1.0
    return Stem(
        name=name, family=model_type, hidden=fields.count("hidden_size"), vocab_size=fields.count("vocab_size"),
        tied=fields.flag("tie_word_embeddings", kind.tied), base="model." if with_head else "", with_head=with_head,
        norm=kind.norm, embedding_scale=kind.embedding_scale, softcap=softcap, logits_scale=kind.scaled,
        rope_width=int(head_dim * partial),
    )  # fmt: skip
