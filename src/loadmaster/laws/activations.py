"""Saved activations: which tensors a block keeps from its forward until its backward, and their bytes.

A stack's rules name values of the block, and the saved set is their union: a tensor that two ops keep counts once, a
view costs nothing beside its root. What the rules name is turned into coefficients once a block; see `polynomial`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from loadmaster.describe.model import Block
from loadmaster.describe.op import Op, OpKind, Split, Value
from loadmaster.describe.precision import BYTES, Precision
from loadmaster.describe.stack import Extra, Kept, Size, Stack
from loadmaster.laws.autocast import LOW_PRECISION, element_bytes, value_bytes
from loadmaster.laws.numbers import Number
from loadmaster.laws.polynomial import Polynomial, Shape

__all__ = [
    "SavedTensor",
    "activation_polynomials",
    "input_polynomial",
    "root",
    "saved_bytes",
    "saved_tensors",
    "term_of",
    "unwritten",
    "value_bytes",
]

_TERMS = {
    OpKind.NORM: "norm", OpKind.ADD: "residual", OpKind.EMBEDDING: "embedding", OpKind.POSITION: "embedding",
    OpKind.ROUTER: "router", OpKind.DISPATCH: "router", OpKind.COMBINE: "router", OpKind.DROPOUT: "dropout",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor kept for backward.

    Attributes:
        name: of the value, or ``op/extra``; op: the first op that keeps it; term: its name in the memory ledger.
        width: elements by the powers of batch and sequence; bytes: of one element.
        split: how parallelism divides it, as `Polynomial` writes it.
        routed: it lies between dispatch and combine: its tokens are those that reached this rank's experts.
    """

    name: str
    op: str
    term: str
    width: int
    bytes: int
    batch_power: int
    seq_power: int
    split: str
    routed: bool = False

    @property
    def item(self) -> tuple[int, int, str, int]:
        """As `Polynomial.of` takes it."""
        return self.batch_power, self.seq_power, self.split, self.width * self.bytes


def term_of(op: Op) -> str:
    """The ledger term an op's saved tensors stand under."""
    return f"activations/{_TERMS.get(op.kind) or op.name.split('.', 1)[0]}"


def root(values: dict[str, Value], name: str) -> Value:
    """The value whose storage `name` lies in; one that aliases another block's value stays as it is."""
    value = values[name]
    while value.alias is not None and value.alias in values:
        value = values[value.alias]
    return value


@lru_cache(maxsize=4096)
def saved_tensors(block: Block, stack: Stack, precision: Precision, selective: bool = False) -> tuple[SavedTensor, ...]:
    """The union of what the block's ops keep, in op order; `selective` drops the extras that are recomputed."""
    values = {v.name: v for v in block.values}
    if selective and stack.selective_matmuls and block.attention is not None:
        return _every_second_matmul(block, stack, precision, values)
    hidden = unwritten(block, stack)
    routed = _routed(block)
    partial = _partial_views(block, stack, values) if stack.copies_views else frozenset()
    sizes = element_bytes(block, stack, precision)
    found: dict[str, SavedTensor] = {}
    for op in block.ops:
        if op.kind is OpKind.LOSS:
            continue  # the loss rule of the stack owns what is as large as the logits
        rule = stack.kept(op)
        for name in _named(op, rule):
            value = values[name] if name in partial else root(values, name)
            elsewhere = value.alias is not None and value.alias not in values  # the block that makes it keeps it
            if value.name not in hidden and not elsewhere:
                tensor = _of_value(op, value, sizes[value.name], value.name in routed)
                if name in op.inputs:
                    tensor = _as_computed(op, tensor, precision)
                found.setdefault(tensor.name, tensor)
        for place in rule.upcast:
            tensor = _upcast(op, root(values, op.inputs[place]), sizes, routed)
            found.setdefault(tensor.name, tensor)
        if selective and op.kind in stack.selective:
            continue
        for extra in rule.extra:
            kept = _of_extra(op, extra, values, precision, sizes)
            if kept is not None:
                found[kept.name] = kept
    return tuple(found.values())


def _as_computed(op: Op, tensor: SavedTensor, precision: Precision) -> SavedTensor:
    """A kept input of a product or of attention that is wider than they compute: each keeps its own cast of it."""
    low = BYTES[precision.compute]
    if op.kind not in LOW_PRECISION or tensor.bytes <= low:
        return tensor
    return replace(tensor, name=f"{op.name}/cast of {tensor.name}", bytes=low)


def _upcast(op: Op, value: Value, sizes: dict[str, int], routed: frozenset[str]) -> SavedTensor:
    """An input kept in fp32: itself, or a copy."""
    tensor = _of_value(op, value, 4, value.name in routed)
    return tensor if sizes[value.name] == 4 else replace(tensor, name=f"{op.name}/fp32_copy")


def _every_second_matmul(
    block: Block, stack: Stack, precision: Precision, values: dict[str, Value]
) -> tuple[SavedTensor, ...]:
    """The block's input, the attention's output and statistics, and every second product counting from the first."""
    found: dict[str, SavedTensor] = {}
    first = values[block.input]
    found[first.name] = _of_value(block.ops[0], first, value_bytes(first, precision), False)
    matmuls = [op for op in block.ops if op.kind is OpKind.MATMUL][::2]
    for op in block.ops:
        if op in matmuls or op.kind is OpKind.ATTENTION:
            output = root(values, op.outputs[0])
            found[output.name] = _of_value(op, output, value_bytes(output, precision), False)
        if op.kind is OpKind.ATTENTION:
            for extra in stack.kept(op).extra:
                tensor = _of_extra(op, extra, values, precision, {})
                if tensor is not None:
                    found[tensor.name] = tensor
    return tuple(found.values())


def _partial_views(block: Block, stack: Stack, values: dict[str, Value]) -> frozenset[str]:
    """Kept views that together cover less than the value they lie in."""
    kept: dict[str, set[str]] = {}
    for op in block.ops:
        for name in _named(op, stack.kept(op)):
            kept.setdefault(root(values, name).name, set()).add(name)
    return frozenset(
        name for base, names in kept.items()
        if base not in names and sum(values[n].width for n in names) < values[base].width
        for name in names
    )  # fmt: skip


def _named(op: Op, rule: Kept) -> list[str]:
    inputs = [op.inputs[i] for i in rule.inputs if i < len(op.inputs)]
    return inputs + [op.outputs[i] for i in rule.outputs if i < len(op.outputs)]


def unwritten(block: Block, stack: Stack) -> frozenset[str]:
    """Values that a fused pair of ops never writes."""
    made = {name: op for op in block.ops for name in op.outputs}
    users: dict[str, list[Op]] = {}
    for op in block.ops:
        for name in op.inputs:
            users.setdefault(name, []).append(op)
    return frozenset(
        name for name, op in made.items()
        if len(users.get(name, ())) == 1 and (op.kind, users[name][0].kind) in stack.fused
    )  # fmt: skip


def _routed(block: Block) -> frozenset[str]:
    """Values between dispatch and combine."""
    names: set[str] = set()
    for op in block.ops:
        if op.kind is OpKind.DISPATCH or (op.kind is not OpKind.COMBINE and names.intersection(op.inputs)):
            names.update(op.outputs)
    return frozenset(names)


def _of_value(op: Op, value: Value, size: int, routed: bool) -> SavedTensor:
    return SavedTensor(
        name=value.name, op=op.name, term=term_of(op), width=value.width, bytes=size,
        batch_power=value.batch_power, seq_power=value.seq_power, split=value.split, routed=routed,
    )  # fmt: skip


def _of_extra(
    op: Op, extra: Extra, values: dict[str, Value], precision: Precision, sizes: dict[str, int]
) -> SavedTensor | None:
    if extra.low_only and BYTES[precision.compute] >= 4:
        return None
    like = values[op.outputs[0] if extra.size is Size.OUTPUT else op.inputs[0]]
    width, batch_power, seq_power = like.width, like.batch_power, like.seq_power
    split: str = like.split
    match extra.size:
        case Size.TOKEN:
            width = max(1, width // _norm_width(op, width))
        case Size.HEADS | Size.SCORES if op.attention is not None:
            width, split = op.attention.num_heads, Split.TP
            seq_power += 1 if extra.size is Size.SCORES else 0
        case Size.WEIGHT:
            width, batch_power, seq_power, split = op.weights[0].numel, 0, 0, op.weights[0].split
        case _:
            pass
    if extra.context_only:
        split = f"context/{split}"
    named = {"compute": BYTES[precision.compute], "param": BYTES[precision.param], "bool": 1}
    if extra.dtype == "input":
        size = sizes.get(root(values, op.inputs[0]).name, BYTES[precision.compute])
    else:
        size = named.get(extra.dtype) or BYTES[extra.dtype]
    return SavedTensor(
        name=f"{op.name}/{extra.name}", op=op.name, term=term_of(op), width=width, bytes=size,
        batch_power=batch_power, seq_power=seq_power, split=split,
    )  # fmt: skip


def _norm_width(op: Op, width: int) -> int:
    """Elements one statistic of a norm covers: the weight's (a head of a q/k norm), or the whole stream."""
    return op.weights[0].shape[0] if op.weights else width


@lru_cache(maxsize=4096)
def activation_polynomials(
    block: Block, stack: Stack, precision: Precision, selective: bool = False
) -> tuple[tuple[str, bool, Polynomial], ...]:
    """(term, routed, bytes) of a block's saved tensors, grouped."""
    groups: dict[tuple[str, bool], list[tuple[int, int, str, int]]] = {}
    for tensor in saved_tensors(block, stack, precision, selective):
        groups.setdefault((tensor.term, tensor.routed), []).append(tensor.item)
    return tuple((term, routed, Polynomial.of(items)) for (term, routed), items in groups.items())


@lru_cache(maxsize=4096)
def input_polynomial(block: Block, precision: Precision, stack: Stack) -> Polynomial:
    """Bytes of the block's input, all that a checkpoint of the block keeps."""
    values = {v.name: v for v in block.values}
    value = root(values, block.input)
    size = element_bytes(block, stack, precision)[value.name]
    return Polynomial.of([(value.batch_power, value.seq_power, value.split, value.width * size)])


def saved_bytes(
    block: Block, stack: Stack, precision: Precision, batch: int, seq_len: int, *,
    tp: int = 1, cp: int = 1, sequence_parallel: bool = False, selective: bool = False,
) -> dict[str, Number]:  # fmt: skip
    """Bytes of every saved tensor of one block on one rank, by the value's name (or ``op/extra``).

    ``bytes(t) = width * element * batch^i * seq_len^j / tp`` (where tensor parallelism divides it).
    """
    shape = Shape(batch=batch, seq_len=seq_len, cp=cp, tp=tp, sequence_parallel=sequence_parallel)
    tensors = saved_tensors(block, stack, precision, selective)
    return {t.name: Polynomial.of([t.item])(shape) for t in tensors}
