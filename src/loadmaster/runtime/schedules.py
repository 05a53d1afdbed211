"""Learning rate as a function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loadmaster.errors import InvalidInput

__all__ = ["SHAPES", "LearningRate"]

SHAPES = ("cosine", "linear", "constant")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Linear warm-up to `peak`, then down to ``peak * final`` at the last step.

    cosine: lr = peak (final + (1 - final) (1 + cos(pi x)) / 2), x the share of the steps after the warm-up.

    Attributes:
        peak: highest rate; steps: of the whole run; warmup: steps until the peak; final: share left at the end.
        shape: one of `SHAPES`.

    Source: I. Loshchilov, F. Hutter, "SGDR" (2017), arXiv:1608.03983, equation 5, without restarts.

    >>> rate = LearningRate(peak=1.0, steps=12, warmup=2, final=0.1)
    >>> [round(rate.at(step), 3) for step in (0, 1, 2, 7, 12)]
    [0.5, 1.0, 1.0, 0.55, 0.1]
    """

    peak: float
    steps: int
    warmup: int = 0
    final: float = 0.1
    shape: str = "cosine"

    def __post_init__(self) -> None:
        if not self.peak > 0 or not math.isfinite(self.peak):
            raise InvalidInput("lr", self.peak, "must be above 0", "give e.g. 3e-4")
        if self.steps < 1:
            raise InvalidInput("steps", self.steps, "must be at least 1", "give a positive count")
        if not 0 <= self.warmup <= self.steps:
            raise InvalidInput("warmup", self.warmup, f"is not within the {self.steps} steps", "give fewer steps")
        if not 0 <= self.final <= 1:
            raise InvalidInput("final_lr", self.final, "is no share of the peak", "give a number from 0 to 1")
        if self.shape not in SHAPES:
            raise InvalidInput("schedule", self.shape, "is not known", f"use one of {', '.join(SHAPES)}")

    def at(self, step: int) -> float:
        """Rate of the step with this index, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        x = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        match self.shape:
            case "cosine":
                down = (1 + math.cos(math.pi * x)) / 2
            case "linear":
                down = 1 - x
            case _:
                return self.peak
        return self.peak * (self.final + (1 - self.final) * down)
