"""Real elements beside ghosts: small integers, masks and counters are computed, so that code may branch on them.

``position_ids.max()``, ``mask.all()``, an optimizer's step counter: such values depend on shapes and constants only,
and are computed for real next to the trace. What depends on weights or activations has no value, and a branch on it is
refused.
"""

from __future__ import annotations

from typing import Any

import torch

from loadmaster.trace.ghost import Ghost

__all__ = ["MAX_ELEMENTS", "Values"]

MAX_ELEMENTS = 1 << 20  # of integers and booleans
MAX_FLOATS = 64  # of floats: counters, scales, learning rates
_NEVER = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")


class Values:
    """Evaluates ops whose every tensor argument has a known value."""

    def __init__(self) -> None:
        self.tainted: dict[int, torch.Tensor] = {}  # real storages overwritten by something unknown, kept alive
        self._never: dict[Any, bool] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real elements of `tensor`, or None."""
        value = tensor.value if isinstance(tensor, Ghost) else tensor
        if value is not None and self.tainted and value.untyped_storage()._cdata in self.tainted:
            return None
        return value

    def taint(self, value: torch.Tensor) -> None:
        """Something unknown was written into this value: neither it nor its views are known any more."""
        self.tainted[value.untyped_storage()._cdata] = value

    def computable(self, func: Any) -> bool:
        """Whether the op's result is a function of its arguments' elements."""
        known = self._never.get(func)
        if known is None:
            known = self._never[func] = func._schema.name in _NEVER or torch.Tag.nondeterministic_seeded in func.tags
        return not known

    def evaluate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The real result; arguments are replaced by their values (which in-place ops then change)."""
        return func(*self._real(args), **self._real(kwargs))

    def _real(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            value = self.of(tree)
            assert value is not None
            return value
        if isinstance(tree, list | tuple):
            return type(tree)([self._real(item) for item in tree])
        if isinstance(tree, dict):
            return {name: self._real(item) for name, item in tree.items()}
        return tree

    @staticmethod
    def worth(tensor: torch.Tensor, *, floats: bool = True) -> bool:
        """Whether a result of this size and type is computed at all."""
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            return floats and tensor.numel() <= MAX_FLOATS
        return tensor.numel() <= MAX_ELEMENTS
