"""A stack: what a training software keeps in device memory, in which dtype, and what it overlaps.

A stack holds rules, never figures of a model: bytes a parameter line by line, what each kind of op leaves for its
backward, what the loss makes of the logits, buffers, overlap. The laws apply them to a model's op table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

from loadmaster.describe.op import Op, OpKind
from loadmaster.describe.precision import Precision
from loadmaster.describe.stack_rules import (
    Alive,
    Allocator,
    Context,
    Deferral,
    Extra,
    Kept,
    LossTensor,
    Size,
    StateLine,
)
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
    context: Context = field(default_factory=Context)
    allocator: Allocator = field(default_factory=Allocator)
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
