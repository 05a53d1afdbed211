"""FLOPs of a dispatched op from its arguments' shapes: matrix products, convolutions, attention, recurrent layers.

A multiply-add is 2. PyTorch's own formulas serve where it has them; CPU attention, which they count as nothing, and
oneDNN's recurrent layers are added: ``2 b h s t (d_qk + d_v)``, and ``2 s b`` times the weights' elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

__all__ = ["forward_flops"]

_aten: Any = torch.ops.aten


def _attention(query: Any, key: Any, value: Any, *_: Any) -> int:
    batch, heads, queries, width = query.shape
    return int(2 * batch * heads * queries * key.shape[-2] * (width + value.shape[-1]))


def _recurrent(x: Any, *weights: Any) -> int:
    tokens = x.numel() // x.shape[-1]
    return int(2 * tokens * (weights[0].numel() + weights[1].numel()))


_OURS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten.mkldnn_rnn_layer.default: _recurrent,
}


def forward_flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """FLOPs of one op; 0 for what does not multiply matrices."""
    if func in _OURS:
        return _OURS[func](*args)
    formula = flop_registry.get(getattr(func, "overloadpacket", func))
    if formula is None:
        return 0
    try:
        return int(formula(*args, **kwargs, out_val=result))
    except TypeError:  # a formula that does not take this overload's arguments
        return 0
