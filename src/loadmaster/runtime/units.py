"""Stage 3: a block's parameters are gathered when it runs, freed after, and the neighbour's are fetched ahead.

Forward: block i waits for its own gather and starts block i + 1's. Backward: a hook on the block's outputs does the
same towards i - 1; an identity on its inputs tells when the block's backward is over, and then its weights are freed
and its gradients reduced. The last block is kept between its forward and its backward, which follow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from loadmaster.runtime.zero import ParameterBucket

__all__ = ["Unit", "wrap_units"]


class Unit:
    """The flat buffers of one block (or of all that lies outside the blocks)."""

    def __init__(self, index: int, weights: Sequence[ParameterBucket], after_backward: Callable[[], None]) -> None:
        self.index, self.weights, self._after_backward = index, list(weights), after_backward
        self.forward_next: Unit | None = None
        self.backward_next: Unit | None = None
        self.backward_open = False

    def gather(self) -> None:
        """Start gathering."""
        for bucket in self.weights:
            bucket.gather()

    def ready(self) -> None:
        """Gather and wait."""
        self.gather()
        for bucket in self.weights:
            bucket.wait()

    def free(self) -> None:
        """Free the gathered weights."""
        for bucket in self.weights:
            bucket.free()

    def before_backward(self) -> None:
        """Called when the gradient of any output arrives."""
        if self.backward_open:
            return
        self.backward_open = True
        self.ready()
        if self.backward_next is not None:
            self.backward_next.gather()

    def after_backward(self) -> None:
        """Called when the gradients of all inputs are there."""
        if self.backward_open:
            self.backward_open = False
            self.free()
            self._after_backward()


class _BackwardEnd(torch.autograd.Function):
    """Identity whose backward runs after everything in the block."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.done = done
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.done()
        return (None, *gradients)


def wrap_units(blocks: Sequence[nn.Module], units: Sequence[Unit]) -> None:
    """Let each block gather and free around its own forward and backward."""
    for i, (block, unit) in enumerate(zip(blocks, units, strict=True)):
        unit.forward_next = units[i + 1] if i + 1 < len(units) else None
        unit.backward_next = units[i - 1] if i > 0 else None
        block.forward = _gathered(block.forward, unit, keep=i == len(units) - 1)


def _gathered(forward: Callable[..., Any], unit: Unit, *, keep: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        unit.ready()
        if unit.forward_next is not None:
            unit.forward_next.gather()
        args, kwargs = _mark_inputs(unit, args, kwargs)
        out = forward(*args, **kwargs)
        hooked = _hook_outputs(unit, out)
        if not (keep and hooked):
            unit.free()
        return out

    return run


def _mark_inputs(unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
    inputs: list[Tensor] = []

    def collect(x: Any) -> Any:
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            inputs.append(x)
        return x

    tree_map(collect, (args, kwargs))
    if not inputs:
        return args, kwargs
    outputs = iter(_BackwardEnd.apply(unit.after_backward, *inputs))  # type: ignore[no-untyped-call]
    wanted = {id(x) for x in inputs}
    swapped: tuple[Any, Any] = tree_map(lambda x: next(outputs) if id(x) in wanted else x, (args, kwargs))
    return swapped


def _hook_outputs(unit: Unit, out: Any) -> bool:
    found = []

    def hook(x: Any) -> Any:
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(lambda gradient: unit.before_backward())  # type: ignore[no-untyped-call]
            found.append(x)
        return x

    tree_map(hook, out)
    return bool(found)
