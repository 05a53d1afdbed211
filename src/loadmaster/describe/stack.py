"""A stack: what a training software keeps in device memory, in which dtype, and what it overlaps.

A stack holds rules, never figures of a model: bytes a parameter line by line, what each kind of op leaves for its
backward, what the loss makes of the logits, buffers, overlap. The laws apply them to a model's op table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

from loadmaster.describe.op import Op, OpKind
from loadmaster.describe.precision import BYTES, Precision
from loadmaster.errors import InvalidInput

__all__ = [
    "STACKS",
    "Alive",
    "Allocator",
    "Context",
    "Deferral",
    "Extra",
    "Kept",
    "LossTensor",
    "Size",
    "Stack",
    "StateLine",
]

# name on the command line -> module below describe.stacks
STACKS = {
    "loadmaster": "loadmaster", "megatron": "megatron", "megatron-deepspeed": "megatron_deepspeed",
    "nanotron": "nanotron", "fsdp2": "fsdp2", "kempnerforge": "kempnerforge", "torchtitan": "torchtitan",
    "deepspeed": "deepspeed",
    "accelerate": "accelerate", "hf-trainer": "accelerate", "composer": "composer", "llm-foundry": "composer",
}  # fmt: skip


class Alive(StrEnum):
    """When a line of bytes exists."""

    ALWAYS = "always"
    BACKWARD = "backward"  # while a backward runs
    STEP = "step"  # in the optimizer step only
    LAZY = "lazy"  # made by a first backward, gone after the optimizer step


class Size(StrEnum):
    """How many elements a tensor has that an op keeps beside its inputs and outputs."""

    TOKEN = "token"  # one a token
    HEADS = "heads"  # one a query head and token
    SCORES = "scores"  # one a head, query and key
    INPUT = "input"  # as its first input
    OUTPUT = "output"  # as its first output
    WEIGHT = "weight"  # as its first weight, whatever the batch


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLine:
    """So many bytes a parameter.

    Attributes:
        term: its name in the memory ledger.
        dtype: a field of `Precision` (``param``, ``compute``, ``grad``, ``reduce``, ``master``, ``moment``) or a dtype.
        zero: ZeRO stage from which it is divided by the shards, None: never.
        when: ``""`` always, ``zero0`` / ``zero1`` only below / from stage 1 on, ``replicas`` with dp > 1 only,
            ``unpiped`` with pp = 1 only; joined by ``+``.
        source: where it is written so.
    """

    term: str
    dtype: str
    alive: Alive = Alive.ALWAYS
    zero: int | None = None
    when: str = ""
    source: str = ""

    def bytes_each(self, precision: Precision) -> int:
        """Bytes a parameter; 0 where the precision keeps no such copy (no master).

        >>> StateLine(term="optimizer/master", dtype="master").bytes_each(Precision.named("bf16-master"))
        4
        """
        dtype = getattr(precision, self.dtype) if self.dtype in Precision.__slots__ else self.dtype
        return 0 if dtype is None else BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """A tensor an op keeps that is neither its input nor its output.

    Attributes:
        size: elements; dtype: ``compute``, ``param``, ``input`` (as its first input has it) or a dtype;
        low_only: only where compute is narrower than fp32.
        context_only: only where context parallelism divides the sequence.
    """

    name: str
    size: Size
    dtype: str = "fp32"
    low_only: bool = False
    context_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What one kind of op leaves for its backward: positions of inputs and outputs, and extras.

    Attributes:
        upcast: positions of inputs kept in fp32: themselves where they are fp32 already, else a copy.
    """

    inputs: tuple[int, ...] = ()
    upcast: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    extra: tuple[Extra, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTensor:
    """A tensor as large as the logits.

    Attributes:
        zero: it exists from that ZeRO stage on only.
        dtype: ``compute`` or a dtype; low_only: only where compute is narrower than fp32.
        forward, backward, head: alive at the peak of the loss's forward, of its backward, of the head's backward.
    """

    name: str
    dtype: str = "fp32"
    low_only: bool = False
    forward: bool = True
    backward: bool = True
    head: bool = False
    zero: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Bytes on the device that the framework's allocator does not count.

    Attributes:
        device: driver context and loaded kernels; communicator: buffers of one NCCL communicator.
    """

    device: int = 0
    communicator: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferral:
    """Whole copies of the stream (4 T h bytes each) that wait for the communication stream before they are reused.

    The host runs ahead of the device; what NCCL still reads or writes cannot be handed out again, so unsharded tensors
    pile up. Receiving from another stage stops the host and with it the pile.

    Attributes:
        copies: by pipeline stages (from that number on), then by tp 2, 4, 8 and more.
        single: fewer where a lone stage has one micro-batch; max_tp, max_devices: none seen beyond.
    """

    copies: tuple[tuple[int, tuple[float, float, float, float]], ...] = ()
    single: float = 0.0
    max_tp: int = 16
    max_devices: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocator:
    """Bytes the caching allocator reserves beyond the live ones.

    Attributes:
        state: share of the long-lived bytes; activations: of the saved tensors; checkpoints: of checkpointed inputs.
        odd_sizes: further share of them where widths are no multiples of one another, so that blocks do not fit.
        step: share of the optimizer step's temporaries: large flat tensors that find no room in cached blocks.
        streams: whole copies of the stream (2 T h bytes) under tensor parallelism; deferral: see there.
        fixed: bytes of small pools and workspaces.
        sigma, sigma_allocated: spread of ln(measured / predicted), of reserved and of live bytes.
    """

    state: float = 0.0
    activations: float = 0.05
    checkpoints: float = 0.0
    odd_sizes: float = 0.0
    step: float = 0.0
    streams: int = 0
    deferral: Deferral = Deferral()
    fixed: int = 0
    sigma: float = 0.04
    sigma_allocated: float = 0.03


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stack:
    """Rules of one training software.

    Attributes:
        precisions: what it makes of a layout's precision, where that differs.
        state: the lines of bytes a parameter.
        saving: (kind, function) to what such an op keeps; (kind, "") is the rule of every function.
        fused: pairs of kinds run as one kernel: the value between them is never written.
        loss: tensors as large as the logits, by `Workload.loss`.
        attention: ``flash``, ``flash_all_to_all`` (under context parallelism) or ``eager`` (scores in memory).
        trained: ``all``, or the linear layers that carry adapters (``linear``, ``attention``) of a frozen model.
        selective: kinds whose extras are recomputed under recompute=selective.
        selective_matmuls: recompute=selective keeps the block's input, the attention and every second matrix product.
        gathered_layers: whole layers alive at once under ZeRO-3.
        reshards_in_pipeline: with pp > 1, layers are let go after their forward (else the rank's stay gathered).
        live_parameters: gathered elements kept at most under ZeRO-3, whatever the layers (0: by layers).
        root_gathered: embedding and head stay gathered for the step.
        retains_unsharded: without `reduce_each_micro_batch`, gradients stay whole (in the reduce dtype) over a window.
        splits_vocab: tensor parallelism divides logits; splits_embedding: and the embedding's table.
        shards_over_cp: shards are taken over dp_shard * cp ranks.
        padded_vocab: vocabulary padded to a multiple of this times tp (0: as is).
        buckets: (how many, elements each) of the gradients' dtype, held for ZeRO's reductions and gathers.
        borrows_gradients: from stage 2 on whole gradients exist bucket by bucket, in buffers that come back.
        copies_views: a view of part of a wider value is copied before it is kept, so that the rest can go.
        head_streams: whole copies of the stream around the head's backward.
        scratch_gradients: weight gradients are accumulated by the product's kernel, and autograd is given a scratch
            tensor instead, one for each distinct shape, kept for ever.
        workspace: bytes of its own matrix library's scratch, before Hopper and from Hopper on.
        deterministic: run with CUBLAS_WORKSPACE_CONFIG=:4096:8, 32 MiB a cuBLAS workspace on any device.
        placement: ``even`` or ``cost`` (blocks to stages by cumulative FLOPs, the head's included).
        autocast: 16-bit compute on wider weights runs under torch.autocast: matrix products and attention make 16-bit
            tensors and keep a cast copy of each wider input, norms and the residual stream stay in fp32.
        overlaps_*: what runs beside compute (the time law reads these).
    """

    name: str
    title: str
    state: tuple[StateLine, ...]
    saving: Mapping[tuple[OpKind, str], Kept]
    loss: Mapping[str, tuple[LossTensor, ...]]
    precisions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    fused: tuple[tuple[OpKind, OpKind], ...] = ()
    attention: str = "flash"
    trained: str = "all"
    selective: tuple[OpKind, ...] = (OpKind.ATTENTION,)
    selective_matmuls: bool = False
    gathered_layers: int = 2
    root_gathered: bool = True
    live_parameters: int = 0
    reshards_in_pipeline: bool = True
    retains_unsharded: bool = False
    splits_vocab: bool = True
    splits_embedding: bool = True
    shards_over_cp: bool = True
    padded_vocab: int = 0
    buckets: tuple[int, int] = (0, 0)
    borrows_gradients: bool = False
    head_streams: int = 0
    copies_views: bool = False
    scratch_gradients: bool = False
    autocast: bool = False
    placement: str = "even"
    workspace: tuple[int, int] = (0, 0)
    deterministic: bool = False
    context: Context = Context()
    allocator: Allocator = Allocator()
    overlaps_gradient_reduction: bool = True
    overlaps_parameter_gather: bool = True
    overlaps_pipeline_send: bool = False
    overlaps_tensor_parallel: bool = False
    compiled: bool = False
    sources: tuple[str, ...] = ()

    @staticmethod
    def named(name: str) -> Stack:
        """The stack called `name`.

        Raises:
            InvalidInput: it is none of `STACKS`.

        >>> Stack.named("megatron").bytes_per_param("bf16-master")
        18
        """
        if name not in STACKS:
            raise InvalidInput("stack", name, "is not known", f"use one of {', '.join(STACKS)}")
        return _load(STACKS[name])

    def variant(self, **changes: Any) -> Stack:
        """The same stack with some rules changed; equal changes give the same object.

        >>> Stack.named("megatron").variant(attention="eager").attention
        'eager'
        """
        key = (self, *((name, id(value) if isinstance(value, Mapping) else value) for name, value in changes.items()))
        if changes and key not in _VARIANTS:
            _VARIANTS[key] = replace(self, **changes)
        return _VARIANTS[key] if changes else self

    def precision(self, name: str) -> Precision:
        """The dtypes it uses when a layout says `name`."""
        return Precision.named(self.precisions.get(name, name))

    def kept(self, op: Op) -> Kept:
        """What `op` leaves for its backward; a traced op names what it was seen to keep."""
        if op.kind is OpKind.OTHER and op.function == "traced":
            return Kept(outputs=tuple(range(len(op.outputs))))
        function = op.function
        if op.attention is not None:
            function = self.attention + ("_dropout" if op.attention.dropout else "")
            if op.function.endswith("_copied") and (op.kind, function + "_copied") in self.saving:
                function += "_copied"
        rule = self.saving.get((op.kind, function))
        rule = rule if rule is not None else self.saving.get((op.kind, ""), Kept())
        return rule if self.trained == "all" else _of_frozen(op, rule, self.trained)

    def loss_tensors(self, loss: str) -> tuple[LossTensor, ...]:
        """What the loss makes of the logits; the eager rule where the stack knows no other."""
        return self.loss.get(loss, self.loss["cross_entropy"])

    def bytes_per_param(self, precision: str) -> int:
        """Bytes a parameter of weights, gradients and state on one rank, nothing sharded (two moments)."""
        dtypes = self.precision(precision)
        return sum(s.bytes_each(dtypes) for s in self.state if s.alive in (Alive.ALWAYS, Alive.LAZY) and not s.when)


def _of_frozen(op: Op, rule: Kept, trained: str) -> Kept:
    """What an op with frozen weights keeps: nothing that only a weight's gradient would need.

    A linear layer needs its input for an adapter alone, a norm no copy for the product with its weight.
    """
    match op.kind:
        case OpKind.MATMUL:
            return rule if carries_adapter(op, trained) else Kept()
        case OpKind.EMBEDDING:
            return Kept()
        case OpKind.NORM:
            return replace(rule, extra=tuple(e for e in rule.extra if e.size is not Size.OUTPUT))
        case _:
            return rule


def carries_adapter(op: Op, targets: str) -> bool:
    """Whether `targets` (``linear``, ``attention``) names this linear layer; the head never carries one."""
    inside = op.name.startswith("attention.") if targets == "attention" else not op.name.startswith("logits")
    return inside and op.kind is OpKind.MATMUL and any(w.multiplies and w.num_experts == 1 for w in op.weights)


@cache
def _load(module: str) -> Stack:
    stack = import_module(f"loadmaster.describe.stacks.{module}").STACK
    assert isinstance(stack, Stack)
    return stack


_VARIANTS: dict[tuple[Any, ...], Stack] = {}  # equal changes give one object, which the laws' caches know by identity
