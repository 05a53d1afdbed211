"""The step-time law against every published run it can describe: errors, intervals, order of layouts, regret, speed.

    python benchmarks/step_time.py [--json] [TABLE ...]

A group is every run of a table with one model, device count and global batch; regret is the measured time of the layout
that the law calls fastest over the best measured one, minus 1. `inside` is the share of measured times within the
stated 90 % interval. Rows of the nanotron sweep that stalled are told by the measurement (see `measured.stalled`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from types import SimpleNamespace

import numpy as np

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.layout import Layout
from loadmaster.describe.model import Model
from loadmaster.describe.stack import Stack
from loadmaster.describe.workload import Workload
from loadmaster.laws.step import step_interval, time_terms
from measured import VALIDATION, Group, cells, errors, load, predict, stalled

JUDGED = (
    "vtrain_a100", "llm_foundry_mpt", "ultrascale_nanotron", "torchtitan", "megatron_bridge_summary",
    "megatron_bridge_cards", "dgxc_recipes",
)  # fmt: skip


def inside(groups: list[Group], predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Whether each measured time lies in its stated interval."""
    found, start = [], 0
    for g in groups:
        seconds = predicted[start : start + len(g.rows)]
        low, high = step_interval(g.cluster, g.stack, g.workload, g.columns, seconds)
        found.append((low <= g.seconds) & (g.seconds <= high))
        start += len(g.rows)
    return np.concatenate(found)


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks, equal values sharing theirs."""
    order = np.argsort(values, kind="stable")
    ranked = np.empty(len(values))
    ranked[order] = np.arange(len(values))
    for value in np.unique(values):
        same = values == value
        ranked[same] = ranked[same].mean()
    return ranked


def choices(groups: list[Group], predicted: np.ndarray, measured: np.ndarray, keep: np.ndarray) -> dict[str, float]:
    """Regret and rank correlation over groups of two (four for the correlation) or more runs."""
    keys = list(zip(*(cells(groups, f) for f in ("model", "n_gpus", "global_batch", "seq_len", "gpu")), strict=True))
    members: dict[object, list[int]] = defaultdict(list)
    for i in np.flatnonzero(keep):
        members[keys[i]].append(int(i))
    regrets, correlations = [], []
    for index in members.values():
        if len(index) < 2:
            continue
        p, m = predicted[index], measured[index]
        regrets.append(100.0 * (m[np.argmin(p)] / m.min() - 1.0))
        if len(index) >= 4 and np.ptp(p) > 0 and np.ptp(m) > 0:
            correlations.append(float(np.corrcoef(ranks(p), ranks(m))[0, 1]))
    if not regrets:
        return {}
    return {"groups": len(regrets), "regret": float(np.mean(regrets)), "worst regret": float(np.max(regrets)),
            "rank correlation": float(np.mean(correlations)) if correlations else float("nan")}  # fmt: skip


def subsets(name: str, groups: list[Group], predicted: np.ndarray, measured: np.ndarray) -> dict[str, np.ndarray]:
    """The parts of a table that are judged on their own."""
    every = np.ones(len(measured), dtype=bool)
    if name not in ("vtrain_a100", "ultrascale_nanotron"):
        return {"every row": every}
    devices = cells(groups, "n_gpus").astype(float)
    if name == "vtrain_a100":
        return {"several nodes": devices > 8, "one node": devices <= 8}
    quick = ~stalled(groups, predicted, measured)
    small = quick & (devices <= 128) & (cells(groups, "tp").astype(int) <= 8)
    return {"every row": every, "without stalls": quick, "without stalls, <= 128 devices, tp <= 8": small}


def score(name: str) -> dict[str, dict[str, float]]:
    """Figures of one table by subset."""
    groups, refused = load(name)
    if not groups:
        return {}
    predicted, measured = predict(groups)
    within = inside(groups, predicted, measured)
    found = {}
    for label, keep in subsets(name, groups, predicted, measured).items():
        found[label] = {
            **errors(predicted[keep], measured[keep]), "inside": 100.0 * float(within[keep].mean()),
            **choices(groups, predicted, measured, keep), "refused": len(refused),
        }  # fmt: skip
    return found


def speed(count: int = 200_000) -> float:
    """Layouts that the time law prices in a second of one core (process time), Llama-3-8B on 1024 H100."""
    rng = np.random.default_rng(0)
    columns = SimpleNamespace(**Layout().to_dict())
    for field, choice in {"tp": (1, 2, 4, 8), "pp": (1, 2, 4, 8), "cp": (1, 2), "micro_batch_size": (1, 2, 4, 8),
                          "dp_shard": (1, 2, 4, 8, 16, 32), "zero": (0, 1, 2, 3)}.items():  # fmt: skip
        setattr(columns, field, rng.choice(np.array(choice), count))
    model, cluster = Model.from_hf("meta-llama/Meta-Llama-3-8B"), Cluster.parse("1024xh100-sxm")
    work, stack = Workload(global_batch_size=1024, seq_len=8192), Stack.named("megatron")
    time_terms(model, cluster, work, columns, stack)
    start = time.process_time()
    time_terms(model, cluster, work, columns, stack)
    return count / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    names = arguments.tables or [*JUDGED, *sorted(p.stem for p in VALIDATION.glob("*.tsv") if p.stem not in JUDGED)]
    found = {name: scores for name in names if (scores := score(name))}
    rate = speed()
    if arguments.json:
        print(json.dumps({"tables": found, "layouts_per_second": rate}))
        return
    heads = ("rows", "mean", "median", "p90", "bias", "inside", "groups", "regret", "worst regret", "rank correlation")
    print(f"{'table':62}" + "".join(f"{h[:11]:>12}" for h in heads))
    for name, scores in found.items():
        for label, figures in scores.items():
            title = f"{name}: {label}"
            print(f"{title:62}" + "".join(f"{figures.get(h, float('nan')):12.2f}" for h in heads))
    print(f"\n{rate:,.0f} layouts a second on one core (time law alone)")


if __name__ == "__main__":
    main()
