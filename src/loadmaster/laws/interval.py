"""How far a prediction may be off: an interval that nine of ten measured values lie in, and a tail probability."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loadmaster.describe.stack import Stack

__all__ = ["Interval", "memory_interval", "time_interval"]

_STRAY = 0.01
_Z90 = 1.6449  # standard deviations either side that hold 90 % of a normal


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A log-normal around a prediction.

    Attributes:
        centre: median of what will be measured; sigma: standard deviation of its logarithm.

    >>> interval = Interval(centre=100.0, sigma=0.05)
    >>> round(interval.low, 1), round(interval.high, 1), round(interval.probability_above(100.0), 3)
    (92.1, 108.6, 0.505)
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
        """Chance that the measured value exceeds `limit`.

        One run in `1 / _STRAY` ends for a reason that no law sees (another version, a flag nobody printed, a leak), so
        that no prediction is ever called sure.
        """
        if self.centre <= 0:
            return 0.0
        return _STRAY + (1 - _STRAY) * _tail(math.log(limit / self.centre) / self.sigma)

    def usable(self, limit: float, risk: float) -> float:
        """Largest prediction that exceeds `limit` with a probability of at most `risk`, at this sigma.

        >>> round(Interval(centre=1.0, sigma=0.05).usable(100.0, 0.05), 1)
        91.6
        """
        low, high = 0.0, 8.0  # log of limit / prediction
        for _ in range(60):
            middle = (low + high) / 2
            above = Interval(centre=math.exp(-middle), sigma=self.sigma).probability_above(1.0)
            low, high = (middle, high) if above > risk else (low, middle)
        return limit * math.exp(-high)


def _tail(deviations: float) -> float:
    return 0.5 * math.erfc(deviations / math.sqrt(2))


def memory_interval(stack: Stack, total: float, *, allocated: bool = False) -> Interval:
    """Of the peak bytes of a stack: the spread of its measured runs around the law.

    `allocated`: of live bytes alone, which the allocator does not blur.
    """
    rule = stack.allocator
    return Interval(centre=float(total), sigma=rule.sigma_allocated if allocated else rule.sigma)


def time_interval(bounds: tuple[float, float]) -> Interval:
    """Of the seconds of a step, from the two between which nine of ten measured values lie.

    >>> interval = time_interval((1.6, 2.4))
    >>> round(interval.low, 6), round(interval.high, 6)
    (1.6, 2.4)
    """
    low, high = bounds
    return Interval(centre=math.sqrt(low * high), sigma=math.log(high / low) / (2 * _Z90))
