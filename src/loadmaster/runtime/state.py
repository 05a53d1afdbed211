"""State without a layout: flat ranges of whole tensors, by the parameter's name and the kind of state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

__all__ = ["ReadState", "StateShard"]

# (name, kind, start, stop) -> the flat range, or None where nothing was saved
ReadState = Callable[[str, str, int, int], Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShard:
    """Elements [start, stop) of the flattened whole tensor, held by this rank.

    Attributes:
        name: the parameter (or buffer) in the state dict.
        kind: ``param``, ``master``, ``buffer``, ``ema``, ``grad``, or the optimizer's word (``exp_avg``).
        full_shape: of the whole tensor; () for a number such as ``step``.
        tensor: flat, stop - start elements.
    """

    name: str
    kind: str
    full_shape: tuple[int, ...]
    start: int
    stop: int
    tensor: Tensor
