"""The search: every layout of the space priced at once; those that do not fit refused, the rest ranked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadmaster.describe.cluster import Cluster, Device
from loadmaster.describe.layout import Layout
from loadmaster.describe.model import Model
from loadmaster.describe.stack import Stack
from loadmaster.describe.workload import Workload
from loadmaster.errors import InvalidInput
from loadmaster.laws.cost import Cost, price
from loadmaster.planner.priced import TIE, Priced, legal_rows, price_space
from loadmaster.planner.refusals import Rejection, refuse_illegal, refuse_too_large
from loadmaster.planner.replay import replayed_seconds
from loadmaster.planner.space import ABILITIES, Ability, degrees, expand
from loadmaster.program.dimensions import Dimensions

__all__ = ["Plan", "PlanResult", "ability_of", "plan", "usual_precision"]

NEAR = 0.05  # share by which the closed form of memory may be above the count of the tables
REPLAYED = 3  # of these, pipelines played action by action
REFINED = 24  # of the best, priced once more one by one, by replay where the laws replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A layout and what it costs."""

    layout: Layout
    cost: Cost

    def to_json(self) -> dict[str, Any]:
        """As `price` prints it."""
        return self.cost.to_json()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """What a search found.

    Attributes:
        plans: best first; empty when nothing fits. rejections: refused layouts, an example a reason and value.
        front: (layout, bytes, seconds) that nothing beats in both; smallest: the layout that needs least memory.
        considered: layouts looked at; priced: of these, legal and priced; seconds: the search took.
    """

    plans: tuple[Plan, ...]
    rejections: tuple[Rejection, ...]
    front: tuple[tuple[Layout, int, float], ...]
    smallest: Cost | None
    considered: int
    priced: int
    seconds: float
    model: Model
    cluster: Cluster
    workload: Workload
    stack: str
    notes: tuple[str, ...] = field(default=())

    @property
    def best(self) -> Plan | None:
        """The first plan."""
        return self.plans[0] if self.plans else None

    def to_json(self) -> dict[str, Any]:
        """The document that ``loadmaster plan --json`` prints."""
        return {
            "plans": [p.to_json() for p in self.plans],
            "rejections": [r.to_json() for r in self.rejections],
            "front": [{"layout": lay.to_dict(), "bytes": b, "seconds": s} for lay, b, s in self.front],
            "considered": self.considered,
            "priced": self.priced,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }


def plan(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    *,
    stack: str | Stack = "loadmaster",
    precision: str | None = None,
    optimizer_bits: int | None = None,
    max_risk: float = 0.1,
    count: int = 8,
) -> PlanResult:
    """Find the fastest layout that fits.

    8-bit optimizer state changes the numerics, so it is tried only where it is asked for (`optimizer_bits`) or nothing
    fits without it.

    Args:
        precision: a name of `Precision.named`; left out, the usual mixed one that the device is fastest in.
        max_risk: largest probability of running out of memory that a plan may carry.
        count: plans returned.

    Raises:
        InvalidInput: a field of the cluster or the workload makes every layout illegal.
    """
    if not 0 < max_risk < 1:
        raise InvalidInput("--risk", max_risk, "is no probability", "give a number between 0 and 1, e.g. 0.05")
    started = perf_counter()
    chosen = stack if isinstance(stack, Stack) else Stack.named(stack)
    dtypes = precision or usual_precision(cluster.device)
    ability = ability_of(chosen, optimizer_bits)
    passes = [(optimizer_bits or 32,)]
    if optimizer_bits is None and 8 in ability.optimizer_bits:
        passes.append((8,))
    dims = Dimensions.of(model)
    whole = degrees(dims, cluster.num_devices, ability, workload)
    legal = legal_rows(dims, workload, whole, cluster)
    rejections = refuse_illegal(dims, workload, whole, cluster)
    considered = int((~legal).sum())
    if not legal.any():
        raise _nothing_legal(rejections)
    for bits in passes:
        groups = expand(whole.take(legal), dims, ability, optimizer_bits=bits, precision=dtypes)
        priced = price_space(model, cluster, workload, chosen, dims, groups, max_risk=max_risk)
        considered += len(priced)
        plans = _refined(priced, model, cluster, workload, chosen, max(REFINED, count))
        if plans:
            break
    return _result(
        priced, plans, model=model, cluster=cluster, workload=workload, chosen=chosen, rejections=rejections,
        considered=considered, count=count, started=started, bits=bits,
    )  # fmt: skip


def usual_precision(device: Device) -> str:
    """Mixed bf16, or fp16 before Ampere; fp32 where neither is faster, as on most processors.

    >>> usual_precision(Cluster.parse("h100-sxm").device), usual_precision(Cluster.parse("v100-sxm-32gb").device)
    ('bf16-mixed', 'fp16-mixed')
    """
    full = device.peak("fp32") or 0.0
    for name in ("bf16", "fp16"):
        if (device.peak(name) or 0.0) > full:
            return f"{name}-mixed"
    return "fp32" if full else "bf16-mixed"


def ability_of(stack: Stack, optimizer_bits: int | None) -> Ability:
    """What the stack can run.

    Raises:
        InvalidInput: it has no optimizer of that many bits.
    """
    ability = ABILITIES.get(stack.name, Ability(recompute=("none", "full")))
    if optimizer_bits is not None and optimizer_bits not in ability.optimizer_bits:
        raise InvalidInput(
            "optimizer_bits", optimizer_bits, f"is nothing that {stack.name} can run",
            f"use {' or '.join(map(str, ability.optimizer_bits))}",
        )  # fmt: skip
    return ability


def _nothing_legal(rejections: Sequence[Rejection]) -> InvalidInput:
    """The refusal closest to the plain layout speaks for all."""
    first = rejections[0].error
    assert first is not None
    return InvalidInput(first.field, first.value, first.rule, first.way_out)


def _thinned(rows: NDArray[np.int64], most: int = 60) -> list[int]:
    """At most so many of the rows, evenly, both ends included."""
    picked = np.unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(np.int64))
    return [int(row) for row in rows[picked]]


def _ranked(costs: Sequence[Cost], stack: Stack) -> list[Cost]:
    """The fastest by replay first, but one that is simpler and as fast as makes no difference before it."""
    if not costs:
        return []
    played = [replayed_seconds(cost, stack) if i < REPLAYED else cost.step_seconds for i, cost in enumerate(costs)]
    least = min(played)

    def key(place: int) -> tuple[float, int]:
        seconds = played[place]
        return (0.0, place) if seconds <= (1 + TIE) * least else (seconds, place)

    return [costs[place] for place in sorted(range(len(costs)), key=key)]


def _refined(
    priced: Priced, model: Model, cluster: Cluster, workload: Workload, stack: Stack, count: int
) -> list[Cost]:
    """The best rows priced one by one, where a law may count tables and not a closed form; those that fit, ranked."""
    found: list[Cost] = []
    for row in priced.best(4 * count, margin=NEAR):
        cost = price(model, cluster, workload, priced.layout(int(row)), stack=stack)
        if cost.memory.total <= priced.usable:
            found.append(cost)
        if len(found) == count:
            break
    return _ranked(found, stack)


def _result(
    priced: Priced, plans: Sequence[Cost], *, model: Model, cluster: Cluster, workload: Workload, chosen: Stack,
    rejections: Sequence[Rejection], considered: int, count: int, started: float, bits: Sequence[int],
) -> PlanResult:  # fmt: skip
    """Gather what was found, explain the refused."""

    def cost(row: Any) -> Cost:
        return price(model, cluster, workload, priced.layout(int(row)), stack=chosen)

    fitting = [c.layout for c in plans]
    too_large = refuse_too_large([cost(row) for row in priced.best_refused(4)], priced.usable, fitting)
    least = int(np.argmin(priced.bytes)) if len(priced) else None
    notes = []
    if 8 in bits and plans:
        notes.append("optimizer state in 8 bits: with 32 bits nothing fits")
    return PlanResult(
        plans=tuple(Plan(layout=c.layout, cost=c) for c in plans[:count]),
        rejections=(*too_large, *rejections),
        front=tuple(
            (priced.layout(r), int(priced.bytes[r]), float(priced.seconds[r])) for r in _thinned(priced.front())
        ),
        smallest=None if least is None else cost(least),
        considered=considered, priced=len(priced), seconds=perf_counter() - started, model=model, cluster=cluster,
        workload=workload, stack=chosen.name, notes=tuple(notes),
    )  # fmt: skip
