"""State when most weights are frozen: what stays whole dominates."""

from __future__ import annotations

__all__ = ["state_per_weight"]


def state_per_weight(
    trained: float, *, weight_shards: int = 1, state_shards: int = 1, moments: int = 2
) -> float:  # fmt: skip
    """Weights, gradients and moments of a rank in units of the model's weights, one dtype throughout.

    ``1 / weight_shards + trained * (1 + moments) / state_shards``; `trained` is the share of weights that take
    gradients (adapters, or the last layers).

    >>> round(state_per_weight(0.1), 4), round(state_per_weight(0.1, weight_shards=8, state_shards=8), 4)
    (1.3, 0.1625)
    >>> round(state_per_weight(0.1, state_shards=8), 4)  # weights whole: what is left whole dominates
    1.0375
    """
    return 1 / weight_shards + trained * (1 + moments) / state_shards
