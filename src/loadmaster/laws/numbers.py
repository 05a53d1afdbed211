"""The few operations a law needs that Python numbers and NumPy columns write differently; scalars stay exact ints."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Number", "ceil_div", "clip", "greater", "lesser", "where"]

Number = Any  # a Python number or a NumPy array, broadcast together


def _columns(*values: Number) -> bool:
    return any(isinstance(v, np.ndarray) for v in values)


def where(condition: Number, a: Number, b: Number) -> Number:
    """`a` where `condition` holds, else `b`.

    >>> where(True, 3, 4), where(np.array([True, False]), 3, 4).tolist()
    (3, [3, 4])
    """
    return np.where(condition, a, b) if _columns(condition, a, b) else (a if condition else b)


def lesser(a: Number, b: Number) -> Number:
    """The smaller."""
    return np.minimum(a, b) if _columns(a, b) else min(a, b)


def greater(a: Number, b: Number) -> Number:
    """The larger."""
    return np.maximum(a, b) if _columns(a, b) else max(a, b)


def clip(value: Number, low: Number, high: Number) -> Number:
    """`value` moved into ``[low, high]``."""
    return lesser(greater(value, low), high)


def ceil_div(a: Number, b: Number) -> Number:
    """a / b rounded up.

    >>> ceil_div(7, 2)
    4
    """
    return -(-a // b)
