"""How much of a pipelined step is idle: closed forms of the schedules, broadcasting; the replay is their oracle.

With p stages, m micro-batches, v chunks a rank, and F, B, W the seconds of a rank's whole share of one micro-batch
(B the input's gradient, W the weights'), a rank is idle for

    GPipe, 1F1B:        (p - 1) (F + B + W)
    interleaved 1F1B:   (p - 1) (F + B + W) / v
    zero bubble H1:     (p - 1) (F + B - W)
    ZB-V, DualPipe-V:   (p - 1) F / 2

and the fraction of the whole step is idle / (m (F + B + W) + idle). Sources: Narayanan et al. 2021 (arXiv 2104.04473,
section 2.2), Qi et al. 2024 (arXiv 2401.10241, table 2; 2405.15362). The folded schedules' figure is what the replay
gives for F = B = W: the lag of the first half-size forward on its way down the ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["bubble_fraction", "bubble_seconds"]


def bubble_seconds(
    schedule: str, *, pp: Any, virtual_stages: Any, forward: Any, backward_input: Any, backward_weight: Any
) -> Any:
    """Idle seconds of a rank in a step, by the forms above.

    Args:
        forward, backward_input, backward_weight: F, B, W, seconds of one micro-batch on a rank.

    >>> bubble_seconds("1f1b", pp=4, virtual_stages=1, forward=1.0, backward_input=1.0, backward_weight=1.0)
    9.0
    """
    whole = forward + backward_input + backward_weight
    match schedule:
        case "zb_h1":
            unit = np.maximum(forward + backward_input - backward_weight, forward)
        case "zb_v" | "dualpipe_v":
            unit = forward / 2
        case "interleaved_1f1b":
            unit = whole / virtual_stages
        case _:
            unit = whole
    return (pp - 1) * unit


def bubble_fraction(schedule: str, *, pp: Any, num_micro_batches: Any, virtual_stages: Any = 1) -> Any:
    """Idle share of the whole step for F = B = W.

    >>> round(bubble_fraction("1f1b", pp=8, num_micro_batches=32), 4)
    0.1795
    >>> round(bubble_fraction("interleaved_1f1b", pp=8, num_micro_batches=32, virtual_stages=2), 4)
    0.0986
    """
    idle = bubble_seconds(
        schedule, pp=pp, virtual_stages=virtual_stages, forward=1.0, backward_input=1.0, backward_weight=1.0
    )
    return idle / (3.0 * num_micro_batches + idle)
