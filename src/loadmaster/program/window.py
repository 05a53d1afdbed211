"""The window table: the forwards and backwards of one optimizer step on one data rank, uneven ends included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loadmaster.errors import InvalidInput

__all__ = ["Action", "num_rounds", "reductions", "split_into_windows", "window_actions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One row.

    Attributes:
        kind: ``F`` forward or ``B`` backward.
        micro_batch: its index in the window.
        reduce: gradients are reduced during this backward.
        fill: this rank has no such micro-batch; it runs an empty one to take part in what the others do.
    """

    kind: Literal["F", "B"]
    micro_batch: int
    reduce: bool = False
    fill: bool = False


def split_into_windows(num_batches: int, accumulation: int) -> tuple[int, ...]:
    """Micro-batches of each window of an epoch; the last may be shorter, and is never dropped.

    Raises:
        InvalidInput: accumulation is below 1.

    >>> split_into_windows(10, 4), split_into_windows(3, 4)
    ((4, 4, 2), (3,))
    """
    if accumulation < 1:
        raise InvalidInput("accumulation", accumulation, "must be at least 1", "use 1 to step after every micro-batch")
    full, rest = divmod(num_batches, accumulation)
    return (accumulation,) * full + ((rest,) if rest else ())


def reduces_each(zero: int, reduce_each_micro_batch: bool) -> bool:
    """Stages 2 and 3 keep no whole gradient between micro-batches, so they reduce after each."""
    return zero >= 2 or reduce_each_micro_batch


def num_rounds(num_micro_batches: int, most_micro_batches: int, *, zero: int, reduce_each: bool = False) -> int:
    """Micro-batches a rank runs, fills included.

    Where gradients are reduced after each micro-batch every rank takes part in as many as the busiest has.

    >>> num_rounds(1, 3, zero=1), num_rounds(1, 3, zero=2)
    (1, 3)
    """
    return most_micro_batches if reduces_each(zero, reduce_each) else num_micro_batches


def reductions(most_micro_batches: int, *, zero: int, reduce_each: bool = False) -> int:
    """How often a bucket is reduced over `dp_shard` in a window.

    >>> reductions(4, zero=0), reductions(4, zero=3)
    (1, 4)
    """
    return most_micro_batches if reduces_each(zero, reduce_each) else 1


def window_actions(
    num_micro_batches: int, most_micro_batches: int, *, zero: int, reduce_each: bool = False
) -> tuple[Action, ...]:
    """The schedule of a rank with one stage: F0 B0 F1 B1 ...

    >>> " ".join(f"{a.kind}{a.micro_batch}{'+' if a.reduce else ''}" for a in window_actions(3, 3, zero=1))
    'F0 B0 F1 B1 F2 B2+'
    >>> [(a.kind, a.fill, a.reduce) for a in window_actions(0, 1, zero=2)]
    [('F', True, False), ('B', True, True)]
    """
    rounds = num_rounds(num_micro_batches, most_micro_batches, zero=zero, reduce_each=reduce_each)
    each = reduces_each(zero, reduce_each)
    actions = []
    for i in range(rounds):
        fill = i >= num_micro_batches
        actions.append(Action(kind="F", micro_batch=i, fill=fill))
        actions.append(Action(kind="B", micro_batch=i, fill=fill, reduce=each or i == rounds - 1))
    return tuple(actions)
