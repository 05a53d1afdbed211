"""Which layer sits on which pipeline stage: every layer exactly once, evenly or by cost.

The embedding goes with the first stage and the head with the last. A stage is a slice of the model; a rank holds
`virtual_stages` of them, looped (interleaved) or folded as a V (ZB-V, DualPipe-V).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadmaster.errors import InvalidInput

__all__ = ["V_SCHEDULES", "Stage", "assign_stages", "balanced_by_cost", "balanced_split"]

V_SCHEDULES = ("zb_v", "dualpipe_v")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A slice of the model.

    Attributes:
        index: place in the model, 0 first; rank: the pipeline rank that holds it; chunk: its number on that rank.
        start, stop: layers, half open.
        embedding, head: it also holds the embedding, the head.
    """

    index: int
    rank: int
    chunk: int
    start: int
    stop: int
    embedding: bool
    head: bool

    @property
    def num_layers(self) -> int:
        """Layers it holds."""
        return self.stop - self.start


def balanced_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers a stage, differing by one at most; the longer ones first.

    >>> balanced_split(30, 4), sum(balanced_split(61, 8)), max(balanced_split(40, 16))
    ((8, 8, 7, 7), 61, 3)
    """
    if num_layers < num_stages:
        raise InvalidInput(
            "layout.pp", num_stages, f"leaves a stage without a layer: the model has {num_layers}",
            f"use pp * virtual_stages of at most {num_layers}",
        )  # fmt: skip
    quotient, rest = divmod(num_layers, num_stages)
    return tuple(quotient + (1 if i < rest else 0) for i in range(num_stages))


def balanced_by_cost(
    costs: Sequence[float], num_stages: int, *, embedding: float = 0.0, head: float = 0.0
) -> tuple[int, ...]:
    """Layers a stage such that the slowest stage is as fast as can be, the layers staying in order.

    Dynamic programme over (stages, layers): best[k][n] = min over j of max(best[k-1][j], cost of layers j..n).
    The head is worth several layers, so the last stage gets fewer.

    Args:
        costs: time of each layer, any unit; embedding, head: their times in the same unit.

    >>> balanced_by_cost([1.0] * 16, 4, head=3.0)
    (5, 5, 5, 1)
    """
    count = len(costs)
    balanced_split(count, num_stages)  # refuses an empty stage
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    best = [embedding + prefix[n] for n in range(count + 1)]
    cuts: list[list[int]] = []
    for k in range(1, num_stages):
        extra = head if k == num_stages - 1 else 0.0
        row, cut = [float("inf")] * (count + 1), [0] * (count + 1)
        for n in range(k + 1, count + 1):
            # latest cut among equals: the longer stages come first
            for j in range(k, n):
                slowest = max(best[j], prefix[n] - prefix[j] + extra)
                if slowest <= row[n]:
                    row[n], cut[n] = slowest, j
        best = row
        cuts.append(cut)
    ends = [count]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    ends.reverse()
    return tuple(stop - start for start, stop in zip([0, *ends], ends, strict=False))


def assign_stages(
    num_layers: int,
    pp: int,
    *,
    virtual_stages: int = 1,
    schedule: str = "1f1b",
    split: Sequence[int] | None = None,
) -> tuple[Stage, ...]:
    """The stages in model order, checked: the sum of their layers is the model's.

    Args:
        split: layers of each of the pp * virtual_stages stages; even when None.

    >>> [(s.rank, s.chunk, s.num_layers) for s in assign_stages(8, 2, virtual_stages=2, schedule="zb_v")]
    [(0, 0, 2), (1, 0, 2), (1, 1, 2), (0, 1, 2)]
    """
    total = pp * virtual_stages
    counts = tuple(split) if split is not None else balanced_split(num_layers, total)
    if len(counts) != total or sum(counts) != num_layers or min(counts) < 0:
        raise InvalidInput(
            "layout.pp", pp, f"a split {counts} does not place {num_layers} layers once each on {total} stages",
            "give one count a stage with the model's number of layers as sum",
        )  # fmt: skip
    stages, start = [], 0
    for index, count in enumerate(counts):
        chunk, rank = divmod(index, pp)
        if schedule in V_SCHEDULES and chunk % 2:
            rank = pp - 1 - rank
        stages.append(Stage(index=index, rank=rank, chunk=chunk, start=start, stop=start + count,
                            embedding=index == 0, head=index == total - 1))  # fmt: skip
        start += count
    return tuple(stages)
