"""A space of layouts with its prices: memory and time of every row at once, and the rows that matter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.layout import Layout
from loadmaster.describe.model import Model
from loadmaster.describe.stack import Stack
from loadmaster.describe.workload import Workload
from loadmaster.laws.interval import memory_interval
from loadmaster.laws.memory import memory_total
from loadmaster.laws.step import time_terms
from loadmaster.planner.space import Columns
from loadmaster.program.dimensions import Dimensions
from loadmaster.program.legal import broken

__all__ = ["TIE", "Priced", "legal_rows", "price_space"]

CHUNK = 1 << 15  # rows priced at a time: a column of them is 256 KiB
TIE = 0.002  # share of the step below which a difference in time decides nothing


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A space with its prices.

    Attributes:
        groups: layouts that share their named choices; seconds, bytes: of each row of all groups in turn.
        usable: bytes a rank may plan with.
    """

    groups: Sequence[Columns]
    seconds: NDArray[np.float64]
    bytes: NDArray[np.float64]
    usable: float

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum([len(group) for group in self.groups])

    def __len__(self) -> int:
        return len(self.seconds)

    def layout(self, row: int) -> Layout:
        """The layout of one row."""
        group = int(np.searchsorted(self._ends, row, side="right"))
        return self.groups[group].layout(int(row - (self._ends[group - 1] if group else 0)))

    @property
    def fits(self) -> NDArray[np.bool_]:
        """Rows within the usable bytes."""
        return self.bytes <= self.usable

    def best(self, count: int, *, margin: float = 0.0) -> NDArray[np.int64]:
        """The fastest rows that fit, best first; of those within `TIE` of the fastest, the simplest first.

        Args:
            margin: share of the usable bytes by which a row may exceed them.
        """
        rows = np.flatnonzero(self.bytes <= (1 + margin) * self.usable)
        if not len(rows):
            return rows
        ties = rows[self.seconds[rows] <= (1 + TIE) * self.seconds[rows].min()]
        involved = np.concatenate([group.involved() for group in self.groups])[ties]
        ties = ties[np.lexsort((self.bytes[ties], self.seconds[ties], involved))][:count]
        return np.append(ties, self._fastest(np.setdiff1d(rows, ties), count))[:count]

    def best_refused(self, count: int) -> NDArray[np.int64]:
        """The fastest rows that do not fit."""
        return self._fastest(np.flatnonzero(~self.fits), count)

    def _fastest(self, rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        if len(rows) > count:
            rows = rows[np.argpartition(self.seconds[rows], count)[:count]]
        return rows[np.lexsort((self.bytes[rows], self.seconds[rows]))]

    def front(self) -> NDArray[np.int64]:
        """The Pareto front: rows that nothing beats in both time and memory, the fastest first."""
        order = np.lexsort((self.bytes, self.seconds))
        lowest = np.minimum.accumulate(self.bytes[order])
        return order[np.append(True, lowest[1:] < lowest[:-1])] if len(order) else order


def legal_rows(dims: Dimensions, workload: Workload, columns: Columns, cluster: Cluster) -> NDArray[np.bool_]:
    """Rows that break no rule."""
    bad = np.zeros(len(columns), dtype=bool)
    for mask in broken(dims, workload, columns, cluster).values():
        bad |= mask
    return ~bad


def price_space(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    stack: Stack,
    dims: Dimensions,
    groups: Iterator[Columns],
    *,
    max_risk: float = 0.1,
) -> Priced:
    """Memory and time of every legal row of `groups`."""
    kept: list[Columns] = []
    seconds: list[NDArray[np.float64]] = []
    sizes: list[NDArray[np.float64]] = []
    for group in groups:
        for part in group.take(legal_rows(dims, workload, group, cluster)).chunks(CHUNK):
            columns: Any = part.compact()
            kept.append(part)
            sizes.append(_column(memory_total(model, cluster, workload, columns, stack), len(part)))
            seconds.append(_total(time_terms(model, cluster, workload, columns, stack), len(part)))
    usable = memory_interval(stack, 1.0).usable(cluster.memory_bytes, max_risk)
    none = np.zeros(0)
    return Priced(
        groups=kept, seconds=np.concatenate(seconds) if seconds else none,
        bytes=np.concatenate(sizes) if sizes else none, usable=usable,
    )  # fmt: skip


def _column(value: Any, count: int) -> NDArray[np.float64]:
    return np.broadcast_to(np.asarray(value, dtype=np.float64), (count,))


def _total(terms: Mapping[str, Any], count: int) -> NDArray[np.float64]:
    """Sum of the terms, a row each."""
    total = np.zeros(count)
    for value in terms.values():
        total += value
    return total
