"""Why layouts were refused: an example for each rule and value, with the shortfall and the way out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.layout import Layout
from loadmaster.describe.workload import Workload
from loadmaster.errors import InvalidInput
from loadmaster.laws.cost import Cost
from loadmaster.planner.remedies import remedies
from loadmaster.planner.space import Columns
from loadmaster.program.dimensions import Dimensions
from loadmaster.program.legal import RULES, broken, explain
from loadmaster.units import format_bytes

__all__ = ["Rejection", "refuse_illegal", "refuse_too_large"]

_EXAMPLES = 8  # values named a rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A refused layout.

    Attributes:
        rule: what it breaks, ``memory`` where it does not fit; shortfall: bytes missing, None for a broken rule.
        count: layouts refused for the same reason.
    """

    layout: Layout
    rule: str
    way_out: str
    shortfall: int | None = None
    count: int = 1
    error: InvalidInput | None = None

    def to_json(self) -> dict[str, Any]:
        """The document's form."""
        return {
            "layout": self.layout.to_dict(),
            "rule": self.rule,
            "shortfall": self.shortfall,
            "way_out": self.way_out,
            "count": self.count,
        }


def refuse_illegal(dims: Dimensions, workload: Workload, columns: Columns, cluster: Cluster | None) -> list[Rejection]:
    """One example for each rule and each value of the field it is about, the plainest layouts first."""
    found = []
    earlier = np.zeros(len(columns), dtype=bool)
    plain = np.lexsort((columns.micro_batch_size, columns.cp, columns.pp, columns.tp, columns.dp_replicate))
    for rule, mask in zip(RULES, broken(dims, workload, columns, cluster).values(), strict=True):
        rows = plain[(np.broadcast_to(mask, len(columns)) & ~earlier)[plain]]
        earlier |= mask
        for example, count in _examples(columns, rule.field, rows):
            layout = columns.layout(example)
            error = explain(rule, dims, workload, layout, cluster)
            found.append(
                Rejection(
                    layout=layout,
                    rule=f"{error.field} = {error.value} {error.rule}",
                    way_out=error.way_out,
                    count=count,
                    error=error,
                )
            )
    return found


def _examples(columns: Columns, field: str, rows: Any) -> Iterator[tuple[int, int]]:
    """(first row, how many) for the smallest values of `field` among `rows`."""
    if not len(rows):
        return
    if field not in columns.fields:
        yield int(rows[0]), len(rows)
        return
    _, first, counts = np.unique(columns.fields[field][rows], return_index=True, return_counts=True)
    for start, count in list(zip(first, counts, strict=True))[:_EXAMPLES]:
        yield int(rows[start]), int(count)


def refuse_too_large(costs: Sequence[Cost], usable: float, fitting: Sequence[Layout]) -> list[Rejection]:
    """The fastest layouts that do not fit, each with the way to the nearest that does.

    That is the cheapest single change that is enough, or else what turns it into the most alike of `fitting`.
    """
    found = []
    for cost in costs:
        enough = [r.change for r in remedies(cost) if cost.memory.total - r.bytes_saved <= usable]
        alike = min((difference(cost.layout, other) for other in fitting), key=len, default={})
        way_out = enough[0] if enough else ",".join(f"{k}={v}" for k, v in alike.items())
        found.append(
            Rejection(
                layout=cost.layout,
                rule=f"memory: needs {format_bytes(cost.memory.total)} a rank, "
                f"{format_bytes(usable)} can be planned with",
                shortfall=int(cost.memory.total - usable),
                way_out=way_out or "nothing in the space fits: more devices, a shorter sequence, or --loss fused",
            )
        )
    return found


def difference(one: Layout, other: Layout) -> dict[str, object]:
    """Fields in which `other` differs from `one`, as it has them."""
    mine = one.to_dict()
    return {name: value for name, value in other.to_dict().items() if mine[name] != value}
