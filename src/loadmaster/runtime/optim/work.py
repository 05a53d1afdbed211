"""What a kernel is handed: one flat range of one tensor, its gradient, its state and this step's numbers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from loadmaster.runtime.optim.rules import Rule, Scalars

__all__ = ["Moment", "Work"]


@dataclass(slots=True)
class Moment:
    """A moment as it is kept: fp32 `data`, or codes with `scales`."""

    data: Tensor
    scales: Tensor | None


@dataclass(slots=True, kw_only=True)
class Work:
    """One tensor's step.

    Attributes:
        rule: update rule.
        param: flat; pointer: where the parameter lies; original: it, if `param` is a contiguous copy of it.
        grad: contiguous, of the same length.
        moments: in the order of `MOMENTS[rule]`.
        scalars: this step's numbers.
        block: elements a scale.
        start: place of the range in the whole tensor; a multiple of `block`.
        key: mix(mix(seed) + step), a 32-bit hash; with a captured step the kernel makes it from the next two.
        seed: mix(seed). step: the count, a 0-dim tensor.
        nesterov: for momentum.
        stochastic: round a 16-bit weight stochastically.
        row: what a kernel keeps of all this between steps.
    """

    rule: Rule
    param: Tensor
    pointer: int
    original: Tensor | None
    grad: Tensor
    moments: list[Moment]
    scalars: Scalars
    block: int
    start: int
    key: int
    seed: int
    step: Tensor
    nesterov: bool
    stochastic: bool
    row: list[int] | None = None
