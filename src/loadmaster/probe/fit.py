"""Latency and bandwidth out of measured times: t(n) = alpha + n / B, with how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["LinkFit", "Sample", "fit_link", "summarise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Repeated times of one operation.

    Attributes:
        wire_bytes: that each rank sends; median: seconds; spread: interquartile range over the median.
    """

    wire_bytes: int
    median: float
    spread: float
    repeats: int


def summarise(wire_bytes: int, seconds: Sequence[float]) -> Sample:
    """Median and spread of repeated times.

    >>> summarise(8, [2.0, 1.0, 3.0]).median
    2.0
    """
    low, middle, high = np.percentile(np.asarray(seconds), (25, 50, 75))
    return Sample(
        wire_bytes=wire_bytes, median=float(middle), spread=float((high - low) / middle), repeats=len(seconds)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """A line through the samples.

    Attributes:
        latency: seconds; bandwidth: bytes/s.
        latency_error, bandwidth_error: standard errors, relative.
        residual: root mean square of the relative distance of the samples from the line.
    """

    latency: float
    bandwidth: float
    latency_error: float
    bandwidth_error: float
    residual: float


def fit_link(samples: Sequence[Sample]) -> LinkFit:
    """Least squares of the relative error, so that small messages fix the latency and large ones the bandwidth.

    minimise sum ((alpha + beta n - t) / t)^2

    alpha and beta are times, so neither goes below zero: where the line would, the smallest message's time is
    taken as alpha, or the largest message's rate as B.

    >>> times = [(n, 1e-4 + n / 1e9) for n in (1000, 10**6, 10**7)]
    >>> line = fit_link([Sample(wire_bytes=n, median=t, spread=0, repeats=1) for n, t in times])
    >>> round(line.latency * 1e6), round(line.bandwidth / 1e6)
    (100, 1000)
    """
    n = np.array([s.wire_bytes for s in samples], dtype=float)
    t = np.array([s.median for s in samples])
    columns = np.stack([1 / t, n / t], axis=1)
    scale = np.linalg.norm(columns, axis=0)
    solution, *_ = np.linalg.lstsq(columns / scale, np.ones(len(t)), rcond=None)
    alpha, beta = solution / scale
    if alpha <= 0:
        alpha, beta = float(t.min()), float(np.median(np.maximum(t - t.min(), 0.1 * t)[1:] / n[1:]))
    elif beta <= 0:
        beta = float(t[-1] / n[-1])
    off = columns @ np.array([alpha, beta]) - 1
    freedom = max(1, len(t) - 2)
    covariance = np.linalg.pinv(columns.T @ columns) * float(off @ off) / freedom
    errors = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    return LinkFit(
        latency=float(alpha), bandwidth=float(1 / beta), latency_error=float(errors[0] / alpha),
        bandwidth_error=float(errors[1] / beta), residual=float(np.sqrt(np.mean(off**2))),
    )  # fmt: skip
