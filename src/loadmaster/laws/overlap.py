"""Gradient buckets against the backward that fills them: replay of two streams, compute and communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BucketTimes", "replay_buckets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTimes:
    """When each bucket was full and when its reduction started and ended, seconds from the backward's start.

    Attributes:
        exposed: seconds from the backward's end to the last reduction's end.
    """

    ready: tuple[float, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    exposed: float


def replay_buckets(
    backward: Sequence[float], reduce: Sequence[float], *, slowdown: float = 0.0, start_after: float = 0.0
) -> BucketTimes:
    """Buckets in gradient-ready order; one reduction at a time, each as soon as its bucket is full.

    Args:
        backward: seconds of backward that fill each bucket; reduce: seconds of each reduction.
        slowdown: share by which a running reduction slows the compute beside it (they share memory bandwidth).
        start_after: no reduction before this second (an earlier collective on the same stream).

    >>> replay_buckets([1.0, 1.0, 1.0], [0.5, 0.5, 2.0]).exposed
    2.0
    >>> replay_buckets([1.0, 1.0], [3.0, 1.0]).exposed
    3.0
    """
    clock, stream = 0.0, start_after
    ready, starts, ends = [], [], []
    for fill, cost in zip(backward, reduce, strict=True):
        # the part of this fill during which a reduction runs goes slower
        beside = min(fill, max(0.0, stream - clock))
        clock += fill + slowdown * beside
        start = max(clock, stream)
        stream = start + cost
        ready.append(clock)
        starts.append(start)
        ends.append(stream)
    exposed = max(0.0, stream - clock) if reduce else 0.0
    return BucketTimes(ready=tuple(ready), starts=tuple(starts), ends=tuple(ends), exposed=exposed)
