"""One operation of a model: what it reads, what it makes, its weights; nothing about how a stack runs it.

A block is a small dataflow: named `Value`s flow between `Op`s. What a stack *saves* for backward is a rule over
(op kind, implementation) that names these values, so a tensor that two ops save is counted once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from loadmaster.errors import InvalidInput

__all__ = ["Attention", "Op", "OpKind", "Split", "Value", "ValueType", "Weight"]


class OpKind(StrEnum):
    """What an operation is; laws and stacks match on it."""

    EMBEDDING = "embedding"  # table look-up: bytes, no FLOPs
    POSITION = "position"  # learned or fixed positions added to the stream
    NORM = "norm"  # function: rms, layer, rms_unit (Gemma's 1 + w), qk
    MATMUL = "matmul"  # y = x W (+ b); experts > 1: grouped
    ROPE = "rope"
    ATTENTION = "attention"  # softmax(q k^T) v
    ACTIVATION = "activation"  # function: silu, gelu, gelu_new, relu, ...
    MULTIPLY = "multiply"  # elementwise product (gate * up)
    ADD = "add"  # residual
    DROPOUT = "dropout"
    SCALE = "scale"  # by a constant
    SOFTCAP = "softcap"
    ROUTER = "router"  # gate scores, top-k
    DISPATCH = "dispatch"  # tokens to experts
    COMBINE = "combine"  # experts to tokens
    CONV = "conv"
    POOL = "pool"
    LOSS = "loss"
    OTHER = "other"  # a traced op with its own figures


class ValueType(StrEnum):
    """Element type of a value, relative to the run's precision."""

    COMPUTE = "compute"
    FP32 = "fp32"
    INT64 = "int64"
    INT32 = "int32"
    BOOL = "bool"


class Split(StrEnum):
    """How tensor parallelism divides a value or a weight."""

    NONE = "none"  # whole on every tp rank
    TP = "tp"  # divided by tp
    SEQUENCE = "sequence"  # divided by tp only under sequence parallelism


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor of a block: ``width * batch**batch_power * seq_len**seq_power`` elements.

    Attributes:
        width: elements per token (or per sample, per score, ... by the powers).
        batch_power, seq_power: (1, 1) a token stream; (1, 2) attention scores; (0, 1) rotary tables;
            (1, 0) a fixed number a sample, e.g. a ViT's 197 patches with `width` 197 * hidden.
        alias: name of the value this one is a view of (costs nothing more).

    >>> Value(name="scores", width=32, seq_power=2).num_elements(batch=2, seq_len=8)
    4096
    """

    name: str
    width: int
    batch_power: int = 1
    seq_power: int = 1
    type: ValueType = ValueType.COMPUTE
    split: Split = Split.NONE
    alias: str | None = None

    def num_elements(self, *, batch: int, seq_len: int) -> int:
        """Elements of the unsharded tensor."""
        return int(self.width * batch**self.batch_power * seq_len**self.seq_power)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A parameter (or fixed table) of an op.

    Attributes:
        name: as in the Hugging Face state dict, below the block: ``self_attn.q_proj.weight``.
        shape: of one copy, as PyTorch stores it.
        num_experts: copies of it, divided over `ep`; 1 for a dense weight.
        top_k: copies a token visits.
        split: whether tensor parallelism divides it, along `split_dim`.
        split_units: indivisible pieces along `split_dim` (heads, KV heads); 0 where any divisor will do.
        multiplies: it is the matrix of a matrix product (2 FLOPs an element a token, forward).
        trainable: False for fixed tables and buffers that a checkpoint counts.
        tied_to: full name of the weight whose storage it shares; it then adds no parameters.
        stacked: all experts lie in one parameter of shape (num_experts, *shape).
    """

    name: str
    shape: tuple[int, ...]
    num_experts: int = 1
    top_k: int = 1
    split: Split = Split.NONE
    split_dim: int = 0
    split_units: int = 0
    multiplies: bool = False
    trainable: bool = True
    tied_to: str | None = None
    stacked: bool = False

    def __post_init__(self) -> None:
        if any(d < 1 for d in self.shape) or self.num_experts < 1 or self.top_k < 1:
            raise InvalidInput(f"weight {self.name}.shape", self.shape, "must be positive", "check the model's config")

    @property
    def numel(self) -> int:
        """Elements of all copies, whether tied or not."""
        return math.prod(self.shape) * self.num_experts

    @property
    def num_params(self) -> int:
        """Elements it adds to the model: none when tied."""
        return 0 if self.tied_to else self.numel

    @property
    def num_active(self) -> int:
        """Elements a token visits, of those it adds."""
        return 0 if self.tied_to else math.prod(self.shape) * min(self.top_k, self.num_experts)

    @property
    def matmul_params(self) -> int:
        """Elements that multiply one token: the head counts, tied or not; an expert weight `top_k` times."""
        return math.prod(self.shape) * min(self.top_k, self.num_experts) if self.multiplies else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The core of an attention op.

    Attributes:
        num_heads, num_kv_heads: query and key/value heads.
        head_dim: of queries and keys; `v_head_dim` of values.
        causal: a query sees only keys at or before it.
        window: keys a query sees at most (None: all).
        cross_tokens: fixed number of keys of a cross-attention (Whisper's 1500 frames), or None.
        dropout: rate of dropout on the attention weights; bias: position biases are added to the scores
            (ALiBi, T5's relative positions), so that no fused causal kernel applies.
        softcap: scores pass through cap * tanh(score / cap); None: they do not.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    causal: bool = True
    window: int | None = None
    cross_tokens: int | None = None
    dropout: float = 0.0
    bias: bool = False
    softcap: float | None = None

    def mean_keys(self, seq_len: int, *, count_causal: bool) -> float:
        """Keys per query on average; the PaLM convention (`count_causal` False) counts the full square.

        >>> a = Attention(num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128, window=4096)
        >>> round(a.mean_keys(32768, count_causal=True), 2), a.mean_keys(32768, count_causal=False)
        (3840.06, 32768)
        """
        if self.cross_tokens is not None:
            return self.cross_tokens
        if not count_causal or not self.causal:
            return seq_len
        window = seq_len if self.window is None else min(self.window, seq_len)
        return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation.

    Attributes:
        name: unique in its block, e.g. ``attention.q``.
        inputs, outputs: names of the block's values.
        function: the variant of the kind (``rms``, ``silu``, ``sdpa`` ...).
        attention: the core's shape, for `OpKind.ATTENTION`.
        flops: forward FLOPs (a token, b=1) of a traced op that no law knows; None elsewhere.
    """

    name: str
    kind: OpKind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[Weight, ...] = ()
    function: str = ""
    attention: Attention | None = None
    flops: float | None = None

    def __post_init__(self) -> None:
        assert (self.kind is OpKind.ATTENTION) == (self.attention is not None), self.name
