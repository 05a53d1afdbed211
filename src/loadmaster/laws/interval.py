"""How far a prediction may be off: an interval that nine of ten measured values lie in, and a tail probability."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loadmaster.describe.stack import Stack

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


def memory_interval(stack: Stack, total: float) -> Interval:
    """Of the peak bytes of a stack: the spread of its measured runs around the law."""
    return Interval(centre=float(total), sigma=stack.allocator.sigma)


def time_interval(total: float, factors: tuple[float, float]) -> Interval:
    """Of the seconds of a step, from the factors between which nine of ten measured values lie.

    >>> interval = time_interval(2.0, (0.8, 1.2))
    >>> round(interval.low, 6), round(interval.high, 6)
    (1.6, 2.4)
    """
    low, high = factors
    return Interval(centre=total * math.sqrt(low * high), sigma=math.log(high / low) / (2 * _Z90))
