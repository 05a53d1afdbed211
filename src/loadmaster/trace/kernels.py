"""Where PyTorch's shape rules and its kernels differ in bytes; each line was found by running both.

- Normalisation of a 16-bit input with 32-bit weights: the kernels keep mean and inverse deviation in the weights'
  dtype, the shape rules say the input's.
- Losses that reduce: the kernels write the reduced value into the (shrunk) storage of the unreduced loss.
- oneDNN's recurrent layers keep a workspace whose size only the kernel knows: it is run once, on zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

__all__ = ["MAX_KERNEL_BYTES", "asks_kernel", "corrected"]

MAX_KERNEL_BYTES = 4 << 30
_aten: Any = torch.ops.aten
_KERNELS = (_aten.mkldnn_rnn_layer.default, _aten.mkldnn_rnn_layer_backward.default)


def asks_kernel(func: Any) -> bool:
    """Whether only the kernel itself can say what the op returns."""
    return func in _KERNELS


def _statistics_like_weight(args: Any, outputs: tuple[Any, ...], *, place: int) -> tuple[Any, ...]:
    weight = args[place] if len(args) > place else None
    if weight is None:
        return outputs
    return outputs[0], *(_in_dtype(output, weight.dtype) for output in outputs[1:])


def _in_dtype(output: Any, dtype: torch.dtype) -> Any:
    if output.dtype is dtype:
        return output
    size = output.storage_bytes // output.dtype.itemsize * dtype.itemsize
    return replace(output, dtype=dtype, storage_bytes=size)


def _unreduced_storage(args: Any, outputs: tuple[Any, ...], *, reduction: int) -> tuple[Any, ...]:
    if len(args) > reduction and args[reduction] == 0:
        return outputs
    shape: Any = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    size = math.prod(shape) * outputs[0].dtype.itemsize
    return (replace(outputs[0], storage_bytes=size, plain=False),)


_CORRECTIONS: dict[Any, Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]] = {
    _aten.native_layer_norm.default: lambda a, o: _statistics_like_weight(a, o, place=2),
    _aten.native_batch_norm.default: lambda a, o: _statistics_like_weight(a, o, place=1),
    _aten._native_batch_norm_legit.default: lambda a, o: _statistics_like_weight(a, o, place=1),
    _aten.native_group_norm.default: lambda a, o: _statistics_like_weight(a, o, place=1),
    _aten.mse_loss.default: lambda a, o: _unreduced_storage(a, o, reduction=2),
    _aten.smooth_l1_loss.default: lambda a, o: _unreduced_storage(a, o, reduction=2),
    _aten.soft_margin_loss.default: lambda a, o: _unreduced_storage(a, o, reduction=2),
    _aten.binary_cross_entropy.default: lambda a, o: _unreduced_storage(a, o, reduction=3),
}


def corrected(func: Any, args: Any, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The outputs of a plan as the kernel makes them."""
    rule = _CORRECTIONS.get(func)
    return outputs if rule is None else rule(args, outputs)
