"""How far a prediction may be off: an interval that nine of ten measured values lie in, and a tail probability."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Interval", "memory_interval", "time_interval"]

_Z90 = 1.6449  # standard deviations either side that hold 90 % of a normal


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A log-normal around a prediction.

    Attributes:
        centre: median of what will be measured; sigma: standard deviation of its logarithm.

    >>> interval = Interval(centre=100.0, sigma=0.05)
    >>> round(interval.low, 1), round(interval.high, 1), round(interval.probability_above(100.0), 2)
    (92.1, 108.6, 0.5)
    """

    centre: float
    sigma: float

    @property
    def low(self) -> float:
        """5th percentile."""
        return self.centre * math.exp(-_Z90 * self.sigma)

    @property
    def high(self) -> float:
        """95th percentile."""
        return self.centre * math.exp(_Z90 * self.sigma)

    def probability_above(self, limit: float) -> float:
        """Chance that the measured value exceeds `limit`."""
        if self.centre <= 0:
            return 0.0
        return 0.5 * math.erfc(math.log(limit / self.centre) / (self.sigma * math.sqrt(2)))

    def usable(self, limit: float, risk: float) -> float:
        """Largest prediction that exceeds `limit` with a probability of at most `risk`, at this sigma.

        >>> round(Interval(centre=1.0, sigma=0.05).usable(100.0, 0.05), 1)
        92.1
        """
        low, high = 0.0, 8.0  # standard deviations
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if 0.5 * math.erfc(middle / math.sqrt(2)) > risk else (low, middle)
        return limit * math.exp(-high * self.sigma)


# standard deviation of log(measured / predicted), by stack: (memory, seconds)
SPREAD = {
    "loadmaster": (0.02, 0.10),
    "megatron": (0.03, 0.06),
    "megatron-deepspeed": (0.06, 0.06),
    "nanotron": (0.10, 0.15),
    "fsdp2": (0.05, 0.10),
    "torchtitan": (0.05, 0.10),
    "composer": (0.10, 0.06),
}
_ELSEWHERE = (0.12, 0.20)


def memory_interval(stack: str, total: float) -> Interval:
    """Of the peak bytes of `stack`."""
    return Interval(centre=float(total), sigma=SPREAD.get(stack, _ELSEWHERE)[0])


def time_interval(stack: str, total: float) -> Interval:
    """Of the step seconds of `stack`."""
    return Interval(centre=total, sigma=SPREAD.get(stack, _ELSEWHERE)[1])
