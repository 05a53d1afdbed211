"""The few operations a law needs that Python numbers and NumPy columns write differently; scalars stay exact ints."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Number", "ceil_div", "clip", "floor_div", "greater", "lesser", "where"]

_COLUMN = np.ndarray
Number = Any  # a Python number or a NumPy array, broadcast together


def where(condition: Number, a: Number, b: Number) -> Number:
    """`a` where `condition` holds, else `b`.

    >>> where(True, 3, 4), where(np.array([True, False]), 3, 4).tolist()
    (3, [3, 4])
    """
    if isinstance(condition, _COLUMN) or isinstance(a, _COLUMN) or isinstance(b, _COLUMN):
        return np.where(condition, a, b)
    return a if condition else b


def lesser(a: Number, b: Number) -> Number:
    """The smaller."""
    return np.minimum(a, b) if isinstance(a, _COLUMN) or isinstance(b, _COLUMN) else min(a, b)


def greater(a: Number, b: Number) -> Number:
    """The larger."""
    return np.maximum(a, b) if isinstance(a, _COLUMN) or isinstance(b, _COLUMN) else max(a, b)


def clip(value: Number, low: Number, high: Number) -> Number:
    """`value` moved into ``[low, high]``."""
    return lesser(greater(value, low), high)


def ceil_div(a: Number, b: Number) -> Number:
    """a / b rounded up; columns are floats that hold whole numbers, where the quotient is rounded up.

    >>> ceil_div(7, 2), ceil_div(np.array([7.0, 8.0]), 2).tolist()
    (4, [4.0, 4.0])
    """
    return np.ceil(a / b) if isinstance(a, _COLUMN) or isinstance(b, _COLUMN) else -(-a // b)


def floor_div(a: Number, b: Number) -> Number:
    """a / b rounded down."""
    return np.floor(a / b) if isinstance(a, _COLUMN) or isinstance(b, _COLUMN) else a // b
