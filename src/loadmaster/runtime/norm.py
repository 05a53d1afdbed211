"""The global gradient norm: every distinct element counted once, the same number on every rank and in every layout."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["clip_factor", "sum_of_squares"]

_ROW = 256  # elements; parameters start at multiples of it, so rows do not depend on the layout


def sum_of_squares(parts: Iterable[Tensor]) -> float:
    """Sum of squares of flat parts, rows in fp32 and their sum in fp64; inf or nan where an element is."""
    total = 0.0
    for part in parts:
        if part.numel() == 0:
            continue
        whole = part.numel() // _ROW * _ROW
        pieces = [part[:whole].view(-1, _ROW), part[whole:].view(1, -1)]
        for piece in pieces:
            if piece.numel():
                norms = torch.linalg.vector_norm(piece, dim=1, dtype=torch.float32)
                total += float(norms.double().square().sum())
    return total


def clip_factor(norm: float, max_norm: float | None) -> float:
    """What to multiply gradients with so that their norm is at most `max_norm`.

    >>> clip_factor(0.8, 1.0), clip_factor(4.0, 1.0), clip_factor(4.0, None)
    (1.0, 0.25, 1.0)
    """
    if max_norm is None or not math.isfinite(norm) or norm <= max_norm:
        return 1.0
    return max_norm / norm
