"""What a search is for: the shortest step on all devices, most tokens a dollar, or the fewest devices."""

from __future__ import annotations

import dataclasses
from typing import Any

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.model import Model
from loadmaster.describe.workload import Workload
from loadmaster.errors import InvalidInput
from loadmaster.planner.search import PlanResult, plan

__all__ = ["OBJECTIVES", "cluster_sizes", "search", "tokens_per_dollar"]

OBJECTIVES = ("time", "dollars", "devices")


def cluster_sizes(cluster: Cluster) -> list[int]:
    """Counts a cluster is bought in: 1, 2, 4 ... up to a node, nodes in powers of two, then the whole."""
    node, sizes, number = cluster.devices_per_node, [], 1
    while number < cluster.num_devices:
        if number <= node or number % node == 0:
            sizes.append(number)
        number *= 2
    return [*sizes, cluster.num_devices]


def tokens_per_dollar(result: PlanResult, price_per_hour: float) -> float:
    """Tokens of the best plan for a dollar, at a price a device-hour."""
    assert result.best is not None
    return result.best.cost.tokens_per_second_per_device * 3600 / price_per_hour


def search(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    *,
    objective: str = "time",
    price_per_hour: float | None = None,
    **options: Any,
) -> PlanResult:
    """The plan that serves the objective; `options` are those of `plan`.

    Raises:
        InvalidInput: unknown objective, or dollars without a price.
    """
    if objective not in OBJECTIVES:
        raise InvalidInput("--objective", objective, "is not known", f"use one of {', '.join(OBJECTIVES)}")
    if objective == "time":
        return plan(model, cluster, workload, **options)
    price = price_per_hour if price_per_hour is not None else cluster.device.price_per_hour
    if objective == "dollars" and (price is None or price <= 0):
        raise InvalidInput("--price", price, "must be known to count dollars", "give --price, dollars a device-hour")
    return _over_sizes(model, cluster, workload, objective, price, options)


def _over_sizes(
    model: Model, cluster: Cluster, workload: Workload, objective: str, price: float | None, options: dict[str, Any]
) -> PlanResult:
    """The best over cluster sizes; the whole cluster's answer where none fits."""
    found: list[PlanResult] = []
    last: PlanResult | None = None
    for number in cluster_sizes(cluster):
        try:
            last = plan(model, cluster.resized(number), workload, **options)
        except InvalidInput:
            continue
        if last.best is None:
            continue
        found.append(last)
        if objective == "devices":
            break
    if not found:
        return last if last is not None else plan(model, cluster, workload, **options)
    if objective == "devices" or price is None:
        return found[0]
    best = max(found, key=lambda r: tokens_per_dollar(r, price))
    note = f"{tokens_per_dollar(best, price):,.0f} tokens a dollar on {best.cluster.num_devices} devices"
    return dataclasses.replace(best, notes=(*best.notes, note))
