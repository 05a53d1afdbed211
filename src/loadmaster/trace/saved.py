"""What autograd holds for backward: a hook that sees every tensor saved and every one let go."""

from __future__ import annotations

from typing import Any

import torch

from loadmaster.trace.timeline import Category
from loadmaster.trace.tracer import Life, Tracer

__all__ = ["saved_tensors_watched"]

_next_sequence: Any = torch._C._autograd._get_sequence_nr


class _Held:
    """A saved tensor; its end is the end of the hold."""

    __slots__ = ("life", "tensor", "tracer")

    def __init__(self, tensor: torch.Tensor, life: Life, tracer: Tracer) -> None:
        self.tensor, self.life, self.tracer = tensor, life, tracer
        life.saves += 1
        if life.saved_from is None:
            life.saved_from = tracer.where.event
            life.saved_by = _next_sequence() - 1
            if life.category is Category.TEMPORARY:
                life.category = Category.ACTIVATION
        life.saved_until = None

    def __del__(self) -> None:
        self.life.saves -= 1
        if not self.life.saves:
            self.life.saved_until = self.tracer.where.event


def saved_tensors_watched(tracer: Tracer) -> Any:
    """A context in which every tensor that autograd saves is noted.

    An inner hook (a checkpoint's) takes precedence: what it does not keep is not saved, and is not noted.
    """

    def pack(tensor: torch.Tensor) -> Any:
        watch = tracer.watches.get(tensor.untyped_storage()._cdata)
        return tensor if watch is None else _Held(tensor, watch.life, tracer)

    def unpack(held: Any) -> torch.Tensor:
        return held.tensor if isinstance(held, _Held) else held

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
