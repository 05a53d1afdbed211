"""What gradient accumulation does to a loss: the mean over counted tokens, and how far other averages are off."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["mean_of_means", "optimizer_steps", "window_loss", "wrong_ratio"]

from loadmaster.program.window import split_into_windows


def window_loss(sums: Sequence[float], counts: Sequence[float]) -> float | None:
    """Loss of a window, sum of the losses over the number of counted tokens; None where no token counts.

        loss = sum_i sum_i / sum_i count_i

    over all micro-batches i of all data ranks.

    >>> round(window_loss([10 * 4.0, 1000 * 2.0], [10, 1000]), 6), window_loss([0.0, 0.0], [0, 0])
    (2.019802, None)
    """
    count = sum(counts)
    return sum(sums) / count if count else None


def mean_of_means(sums: Sequence[float], counts: Sequence[float]) -> float:
    """The mean of the micro-batches' means, which weighs tokens of short micro-batches more: a common mistake.

    >>> mean_of_means([40.0, 2000.0], [10, 1000])
    3.0
    """
    means = [s / c for s, c in zip(sums, counts, strict=True) if c]
    return sum(means) / len(means)


def wrong_ratio(accumulation: int, mistake: str) -> float:
    """Factor on loss and gradient norm of a mistake: a sum that was not divided, or divided twice.

    >>> wrong_ratio(8, "not divided"), wrong_ratio(8, "divided twice")
    (8.0, 0.125)
    """
    return float(accumulation) if mistake == "not divided" else 1.0 / accumulation


def optimizer_steps(num_batches: int, accumulation: int, *, epochs: int = 1) -> int:
    """Optimizer (and schedule) steps: ceil(batches / accumulation) an epoch, the last window as short as it is.

    >>> optimizer_steps(10, 4), optimizer_steps(3, 4), optimizer_steps(10, 4, epochs=2)
    (3, 1, 6)
    """
    return epochs * len(split_into_windows(num_batches, accumulation))
