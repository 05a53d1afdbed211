"""Bytes of each value's elements: one compute dtype, or what torch.autocast makes of wider weights.

Under autocast matrix products, convolutions and attention take and make the 16-bit dtype; whatever meets an fp32 tensor
(a norm's weight, the residual stream, rotary tables made for it) is fp32 again.
"""

from __future__ import annotations

from functools import lru_cache

from loadmaster.describe.model import Block
from loadmaster.describe.op import Op, OpKind, Value, ValueType
from loadmaster.describe.precision import BYTES, Precision
from loadmaster.describe.stack import Stack

__all__ = ["LOW_PRECISION", "element_bytes", "value_bytes"]

LOW_PRECISION = (OpKind.MATMUL, OpKind.CONV, OpKind.ATTENTION)
_FP32 = (OpKind.NORM, OpKind.EMBEDDING, OpKind.POSITION, OpKind.ROPE)
_FIXED_BYTES = {ValueType.FP32: 4, ValueType.INT64: 8, ValueType.INT32: 4, ValueType.BOOL: 1}


def value_bytes(value: Value, precision: Precision) -> int:
    """Bytes of one element of a value."""
    return _FIXED_BYTES.get(value.type, BYTES[precision.compute])


@lru_cache(maxsize=4096)
def element_bytes(block: Block, stack: Stack, precision: Precision) -> dict[str, int]:
    """Bytes of an element of every value of the block, by name."""
    sizes = {v.name: value_bytes(v, precision) for v in block.values}
    compute, param = BYTES[precision.compute], BYTES[precision.param]
    if not stack.autocast or compute >= param:
        return sizes
    floating = {v.name for v in block.values if v.type is ValueType.COMPUTE}
    made = {name for op in block.ops for name in op.outputs}
    for value in block.values:
        if value.name in floating and value.name not in made and value.alias is None:
            sizes[value.name] = param  # the residual stream comes in as the embedding made it
    for op in block.ops:
        size = _output_bytes(op, sizes, compute, param)
        for value in block.values:
            if value.name in floating and (value.name in op.outputs or value.alias in op.outputs):
                sizes[value.name] = size
    return sizes


def _output_bytes(op: Op, sizes: dict[str, int], compute: int, param: int) -> int:
    if op.kind in LOW_PRECISION:
        return compute
    if op.kind in _FP32:
        return param
    return max((sizes[name] for name in op.inputs), default=compute)
