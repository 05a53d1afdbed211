"""Working set: what a block's backward needs beyond the saved tensors, by replaying its ops in reverse.

While op k runs backward, alive are the gradients that wait, those it makes, and the saved tensors it and the ops
before it keep. The largest such sum over k, less the block's saved tensors, is the transient of the backward.
"""

from __future__ import annotations

from functools import lru_cache

from loadmaster.describe.model import Block
from loadmaster.describe.op import Op, OpKind, Split, Value, ValueType
from loadmaster.describe.precision import Precision
from loadmaster.describe.stack import Stack
from loadmaster.laws.activations import root, saved_tensors, unwritten, value_bytes
from loadmaster.laws.polynomial import Polynomial

__all__ = ["backward_transients"]

Item = tuple[int, int, str, int]
_NO_GRADIENT = (ValueType.INT64, ValueType.INT32, ValueType.BOOL)


@lru_cache(maxsize=4096)
def backward_transients(block: Block, stack: Stack, precision: Precision) -> tuple[Polynomial, ...]:
    """Candidates for the peak of a block's backward beyond its saved tensors; the law takes their maximum.

    For a gated MLP run by fused kernels the start of the backward wins: the stream's gradient 2Th, that of the
    product 2Tf and of its two inputs 4Tf, less the product 2Tf that the down projection no longer needs:
    ``4 T f + 2 T h`` bytes.
    """
    values = {v.name: v for v in block.values}
    hidden = unwritten(block, stack)
    saved = {t.name: t for t in saved_tensors(block, stack, precision)}
    last_use = {t.name: _first_keeper(block, stack, values, t.name) for t in saved.values()}
    owner = {name: op for op in block.ops for name in op.outputs}
    alive: dict[str, Item] = {block.output: _item(root(values, block.output), precision)}  # by storage
    storage = {block.output: block.output}  # gradient of a value -> the storage it lies in
    freed: list[Item] = []
    candidates: list[Polynomial] = []
    for op in reversed(block.ops):
        if op.kind is OpKind.LOSS or (op.outputs and op.outputs[0] in hidden):
            continue
        if op.kind is OpKind.ADD:  # a sum hands its gradient on as it is
            storage.update({n: storage[op.outputs[0]] for n in op.inputs if op.outputs[0] in storage})
            continue
        made = {n: _item(values[n], precision) for n in _needs_gradient(op, values, hidden, owner)}
        candidates.append(Polynomial.of([*alive.values(), *made.values(), *_gathered(op, values, precision),
                                         *((b, s, d, -c) for b, s, d, c in freed)]))  # fmt: skip
        _hand_on(op, alive, storage, made)
        done = {op.name, *(owner[n].name for n in op.inputs if n in hidden)}
        freed += [saved[n].item for n, keeper in last_use.items() if keeper in done]
    return _undominated(candidates)


def _hand_on(op: Op, alive: dict[str, Item], storage: dict[str, str], made: dict[str, Item]) -> None:
    """Gradients of outputs go unless a sum handed them on; those of inputs stay (one that waits takes the sum)."""
    for name in op.outputs:
        place = storage.pop(name, None)
        if place is not None and place not in storage.values():
            alive.pop(place, None)
    for name, item in made.items():
        if name not in storage:
            storage[name] = name
            alive[name] = item


def _needs_gradient(op: Op, values: dict[str, Value], hidden: frozenset[str], owner: dict[str, Op]) -> list[str]:
    """Inputs that get a gradient; of a value never written, the inputs of the op fused with this one."""
    names: list[str] = []
    for name in op.inputs:
        names += owner[name].inputs if name in hidden else (name,)
    return [n for n in names if values[n].type not in _NO_GRADIENT and values[n].batch_power]


def _item(value: Value, precision: Precision) -> Item:
    return value.batch_power, value.seq_power, str(value.split), value.width * value_bytes(value, precision)


def _gathered(op: Op, values: dict[str, Value], precision: Precision) -> list[Item]:
    """Whole copies of a stream that sequence parallelism divides, around a column-split product's backward."""
    if op.kind in (OpKind.DISPATCH, OpKind.COMBINE):  # an all-to-all reads one copy and writes another
        return [_item(values[op.outputs[0] if op.kind is OpKind.DISPATCH else op.inputs[0]], precision)]
    if op.kind is not OpKind.MATMUL:
        return []
    x, y = values[op.inputs[0]], values[op.outputs[0]]
    if x.split is Split.SEQUENCE and y.split is Split.TP:
        return [(x.batch_power, x.seq_power, "gathered", 2 * x.width * value_bytes(x, precision))]
    if x.split is Split.TP and y.split is Split.SEQUENCE:
        return [(y.batch_power, y.seq_power, "gathered", y.width * value_bytes(y, precision))]
    return []


def _first_keeper(block: Block, stack: Stack, values: dict[str, Value], name: str) -> str:
    """The op whose backward is the last to need a saved tensor: the first that kept it."""
    for op in block.ops:
        rule = stack.kept(op)
        names = [op.inputs[i] for i in (*rule.inputs, *rule.upcast) if i < len(op.inputs)]
        names += [op.outputs[i] for i in rule.outputs if i < len(op.outputs)]
        if name in {root(values, n).name for n in names} or name.startswith(f"{op.name}/"):
            return op.name
    return ""


def _undominated(candidates: list[Polynomial]) -> tuple[Polynomial, ...]:
    kept: list[Polynomial] = []
    for candidate in candidates:
        if any(k.covers(candidate) for k in kept):
            continue
        kept = [k for k in kept if not candidate.covers(k)] + [candidate]
    return tuple(kept)
