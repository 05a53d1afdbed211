"""Why a plan is the best one: what to cut first, what the next-best trade, how few devices do, what bandwidth buys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from loadmaster.describe.cluster import Cluster, Link
from loadmaster.describe.model import Model
from loadmaster.describe.stack import Stack
from loadmaster.describe.workload import Workload
from loadmaster.laws.cost import Cost, price
from loadmaster.laws.interval import memory_interval
from loadmaster.laws.memory import memory_total
from loadmaster.planner.objective import cluster_sizes
from loadmaster.planner.refusals import difference
from loadmaster.planner.remedies import Remedy, remedies
from loadmaster.planner.replay import better_split
from loadmaster.planner.search import PlanResult, ability_of
from loadmaster.planner.space import Columns, degrees, expand
from loadmaster.program.dimensions import Dimensions
from loadmaster.program.legal import broken

__all__ = ["Explanation", "Trade", "explain", "smallest_cluster"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trade:
    """Another plan against the best one: which fields differ, seconds and bytes more (or fewer, negative)."""

    change: str
    seconds_added: float
    bytes_added: int

    def to_json(self) -> dict[str, Any]:
        """The document's form."""
        return {"change": self.change, "seconds_added": self.seconds_added, "bytes_added": self.bytes_added}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What surrounds the best plan.

    Attributes:
        remedies: changes that save memory, the best bargain first; trades: the next-best plans.
        smallest_devices: fewest devices of this kind that hold the model, None when not even the given ones do.
        bandwidth: (what, seconds a step would take) with a faster link or memory.
        split: layers a stage that would be faster than an even split, and the step's seconds; None where even is best.
    """

    remedies: tuple[Remedy, ...]
    trades: tuple[Trade, ...]
    smallest_devices: int | None
    bandwidth: tuple[tuple[str, float], ...]
    split: tuple[tuple[int, ...], float] | None = None

    def to_json(self) -> dict[str, Any]:
        """The document's form."""
        return {
            "remedies": [r.to_json() for r in self.remedies],
            "trades": [t.to_json() for t in self.trades],
            "smallest_devices": self.smallest_devices,
            "bandwidth": [{"change": what, "step_seconds": seconds} for what, seconds in self.bandwidth],
            "split": None
            if self.split is None
            else {"layers_per_stage": list(self.split[0]), "step_seconds": self.split[1]},
        }


def explain(result: PlanResult) -> Explanation:
    """Explain the best plan of a search that found one."""
    assert result.best is not None
    best, stack = result.best.cost, Stack.named(result.stack)
    return Explanation(
        remedies=tuple(remedies(best)),
        trades=tuple(_trade(best, p.cost) for p in result.plans[1:]),
        smallest_devices=smallest_cluster(
            result.model, result.cluster, result.workload, stack, precision=best.layout.precision
        ),
        bandwidth=_bandwidth(best),
        split=better_split(best, stack, memory_interval(stack, 1.0).usable(best.cluster.memory_bytes, 0.1)),
    )


def _trade(best: Cost, other: Cost) -> Trade:
    change = difference(best.layout, other.layout)
    return Trade(
        change=",".join(f"{k}={v}" for k, v in change.items()), seconds_added=other.step_seconds - best.step_seconds,
        bytes_added=int(other.memory.total - best.memory.total),
    )  # fmt: skip


def _bandwidth(best: Cost) -> tuple[tuple[str, float], ...]:
    """The same layout with one tier made faster."""
    cluster = best.cluster

    def seconds(changed: Cluster) -> float:
        return price(best.model, changed, best.workload, best.layout, stack=best.stack).step_seconds

    def doubled(link: Link) -> Link:
        return replace(link, bandwidth=2 * link.bandwidth)

    found = []
    if cluster.num_nodes > 1:
        found.append(("inter-node bandwidth x 2", seconds(replace(cluster, inter_node=doubled(cluster.inter_node)))))
        found.append(
            ("inter-node links as fast as intra-node", seconds(replace(cluster, inter_node=cluster.intra_node)))
        )
    if cluster.devices_per_node > 1:
        found.append(("intra-node bandwidth x 2", seconds(replace(cluster, intra_node=doubled(cluster.intra_node)))))
    return tuple(found)


def smallest_cluster(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    stack: Stack,
    *,
    max_risk: float = 0.1,
    bits: Sequence[int] = (32,),
    precision: str = "bf16-mixed",
) -> int | None:
    """Fewest devices on which some layout of the space fits; counts tried are those a cluster is bought in.

    Only the leanest choices are priced: the smallest micro-batch, everything recomputed.
    """
    usable = memory_interval(stack, 1.0).usable(cluster.memory_bytes, max_risk)
    for number in cluster_sizes(cluster):
        columns: Any
        for columns in _leanest(model, cluster.resized(number), workload, stack, bits, precision):
            if np.any(memory_total(model, cluster.resized(number), workload, columns, stack) <= usable):
                return number
    return None


def _leanest(
    model: Model, cluster: Cluster, workload: Workload, stack: Stack, bits: Sequence[int], precision: str
) -> list[Columns]:
    dims, ability = Dimensions.of(model), ability_of(stack, None)
    lean = replace(
        ability, recompute=tuple(r for r in ability.recompute if r == "full") or ability.recompute[-1:],
        schedules=ability.schedules[:1],
    )  # fmt: skip
    whole = degrees(dims, cluster.num_devices, lean, workload)
    bad = np.zeros(len(whole), dtype=bool)
    for mask in broken(dims, workload, whole, cluster).values():
        bad |= mask
    small = whole.take(~bad)
    if not len(small):
        return []
    small = small.take(small.micro_batch_size == small.micro_batch_size.min())
    return list(expand(small, dims, lean, optimizer_bits=bits, precision=precision))
