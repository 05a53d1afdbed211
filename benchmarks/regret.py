"""Regret of the planner's choice on published runs: the chosen layout's measured time over the best measured, minus 1.

A group is every run of one source with the same model, devices, sequence and global batch; the choice is the layout
the laws price fastest (all of them ran, so memory decides nothing here). Sources: vTrain (A100, one node and more) and
Ultrascale (H100).

    python benchmarks/regret.py [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadmaster.describe.row import Described, describe_row, read_rows
from loadmaster.errors import LoadmasterError
from loadmaster.laws.cost import Cost, price

TABLES = Path(__file__).parents[1] / "validation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One group: what the law chose, what was measured best, and how the orders agree."""

    key: str
    runs: int
    regret: float
    rank_correlation: float
    chosen: str
    best: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A measured run and what the laws say of it."""

    run: Described
    cost: Cost

    @property
    def seconds(self) -> float:
        """Measured."""
        return self.run.step_seconds or 0.0

    @property
    def stalled(self) -> bool:
        """Runs of the nanotron sweep with pp > 1 that waited half a second or more for every micro-batch.

        Decided by the measurement, so figures without them say how the law ranks runs that did not stall.
        """
        layout = self.run.layout
        excess = self.seconds - self.cost.step_seconds
        return layout.pp > 1 and excess > 0.4 * layout.num_micro_batches(self.run.workload)


def measured(table: str) -> list[Priced]:
    """Every finished run of a table with a time that can be described."""
    found = []
    for row in read_rows(TABLES / f"{table}.tsv"):
        try:
            run = describe_row(row)
            if run.step_seconds is None or run.failed:
                continue
            found.append(Priced(run=run, cost=price(run.model, run.cluster, run.workload, run.layout, stack=run.stack)))
        except LoadmasterError:
            continue
    return found


def groups(runs: Iterable[Priced]) -> dict[str, list[Priced]]:
    """Runs by what they have in common, where there is a choice."""
    found: dict[str, list[Priced]] = defaultdict(list)
    for priced in runs:
        model, work = priced.run.model, priced.run.workload
        shape = f"{model.hidden_size}x{model.num_layers}x{model.vocab_size}"
        batch = f"{work.global_batch_size}x{work.seq_len}"
        found[f"{shape} devices={priced.run.cluster.num_devices} batch={batch}"].append(priced)
    return {key: members for key, members in found.items() if len(members) > 1}


def choose(key: str, runs: list[Priced]) -> Choice:
    """The fastest predicted against the fastest measured."""
    picked = min(runs, key=lambda r: r.cost.step_seconds)
    best = min(runs, key=lambda r: r.seconds)
    return Choice(
        key=key, runs=len(runs), regret=picked.seconds / best.seconds - 1,
        rank_correlation=_spearman([r.cost.step_seconds for r in runs], [r.seconds for r in runs]),
        chosen=picked.run.layout.describe(), best=best.run.layout.describe(),
    )  # fmt: skip


def _spearman(a: list[float], b: list[float]) -> float:
    """Rank correlation; ties share their mean rank."""

    def ranks(values: list[float]) -> list[float]:
        order = sorted(values)
        return [order.index(v) + (order.count(v) - 1) / 2 for v in values]

    try:
        return statistics.correlation(ranks(a), ranks(b))
    except statistics.StatisticsError:
        return 1.0  # all equal


def summary(name: str, choices: Iterable[Choice]) -> dict[str, Any]:
    """Figures over the groups of one source."""
    found = list(choices)
    regrets = [c.regret for c in found]
    large = [c.rank_correlation for c in found if c.runs >= 4]
    return {
        "source": name,
        "groups": len(found),
        "runs": sum(c.runs for c in found),
        "mean_regret": statistics.mean(regrets),
        "median_regret": statistics.median(regrets),
        "worst_regret": max(regrets),
        "chose_the_best": sum(r == 0 for r in regrets) / len(regrets),
        "mean_rank_correlation_of_groups_of_4": statistics.mean(large) if large else None,
    }


def _sources() -> Iterator[tuple[str, list[Priced]]]:
    vtrain, ultrascale = measured("vtrain_a100"), measured("ultrascale_nanotron")
    yield "vTrain multi-node", [r for r in vtrain if r.run.cluster.num_nodes > 1]
    yield "vTrain one node", [r for r in vtrain if r.run.cluster.num_nodes == 1]
    yield "Ultrascale, every finished run", ultrascale
    going = [r for r in ultrascale if not r.stalled]
    yield "Ultrascale, runs without the stall", going
    near = [r for r in going if r.run.cluster.num_devices <= 128 and r.run.layout.tp <= 8]
    yield "Ultrascale, without the stall, up to 128 devices, tp <= 8", near


def _print(told: dict[str, Any], worst: Iterable[Choice]) -> None:
    print(
        f"{told['source']}: {told['groups']} groups, {told['runs']} runs; regret mean {told['mean_regret']:.2%}, "
        f"median {told['median_regret']:.2%}, worst {told['worst_regret']:.2%}; "
        f"the best was chosen in {told['chose_the_best']:.0%}; "
        f"rank correlation {told['mean_rank_correlation_of_groups_of_4'] or float('nan'):.3f}"
    )
    for choice in worst:
        print(f"  {choice.regret:7.2%} {choice.key}: chose {choice.chosen}; best {choice.best}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worst", type=int, default=3, help="groups shown a source")
    args = parser.parse_args()
    documents = []
    for name, runs in _sources():
        choices = [choose(key, members) for key, members in groups(runs).items()]
        documents.append(summary(name, choices))
        if not args.json:
            _print(documents[-1], sorted(choices, key=lambda c: -c.regret)[: args.worst])
    if args.json:
        print(json.dumps(documents))


if __name__ == "__main__":
    main()
