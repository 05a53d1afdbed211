"""Dynamic loss scaling for fp16: halve on overflow, double after a run of good steps; one verdict for all ranks."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LossScaler"]


@dataclass(slots=True, kw_only=True)
class LossScaler:
    """The scale and how it moves; once a window, from the agreed verdict.

    >>> scaler = LossScaler(scale=2.0**32)
    >>> skips = 0
    >>> while 0.75 * scaler.scale > 65504:      # a gradient of 0.75 overflows fp16 until 2**16
    ...     scaler.update(overflow=True); skips += 1
    >>> skips, scaler.scale
    (16, 65536.0)
    """

    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000
    smallest: float = 2.0**-24
    good_steps: int = 0

    def update(self, *, overflow: bool) -> None:
        """After a window: overflow means the step was skipped."""
        if overflow:
            self.scale, self.good_steps = max(self.scale * self.backoff, self.smallest), 0
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.scale, self.good_steps = self.scale * self.growth, 0

    def state(self) -> dict[str, float]:
        """To be saved."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load(self, state: dict[str, float]) -> None:
        """As `state` gave it."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
