"""Published nccl-tests curves against the collectives law: start-up, bandwidth, and what the square root is worth.

    python benchmarks/collectives.py [--json]

For every system with a curve of six sizes or more, t = alpha + gamma sqrt(bytes) + traffic / B is fitted to the times,
relative errors counting alike, with gamma free and with gamma = 0. Data: benchmarks/data/collectives.tsv (facts from
public logs, each with its source). scipy is needed.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from loadmaster.laws.collectives import Tier, bus_bandwidth, bus_factor, collective_seconds

DATA = Path(__file__).parent / "data" / "collectives.tsv"


def curves() -> dict[tuple[str, str, int, int], tuple[np.ndarray, np.ndarray]]:
    """(system, op, ranks, nodes) to sizes in bytes and times in seconds."""
    found: dict[tuple[str, str, int, int], list[tuple[float, float]]] = defaultdict(list)
    with DATA.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            if row["size_bytes"] and row["time_us"]:
                key = (row["system_id"], row["op"], int(row["n_gpus"]), int(row["n_nodes"]))
                found[key].append((float(row["size_bytes"]), float(row["time_us"]) * 1e-6))
    return {k: tuple(np.array(sorted(v)).T) for k, v in found.items() if len(v) >= 6}  # type: ignore[misc]


def fit_tier(op: str, ranks: int, sizes: np.ndarray, seconds: np.ndarray, *, root: bool) -> Tier:
    """Non-negative least squares of relative errors."""
    columns = [np.ones_like(sizes), float(bus_factor(op, ranks)) * sizes]
    columns += [np.sqrt(sizes)] if root else []
    scale = np.array([1.0 / c.max() for c in columns])
    solution, _ = nnls(np.stack(columns, axis=1) * scale / seconds[:, None], np.ones_like(seconds))
    alpha, slope, *rest = solution * scale
    return Tier(alpha=float(alpha), bandwidth=1.0 / max(float(slope), 1e-15), gamma=float(rest[0]) if rest else 0.0)


def score() -> list[dict[str, float | str | int]]:
    """One line a curve."""
    lines = []
    for (system, op, ranks, nodes), (sizes, seconds) in curves().items():
        errors, tiers = [], []
        for root in (False, True):
            tier = fit_tier(op, ranks, sizes, seconds, root=root)
            predicted = collective_seconds(op, sizes, ranks, tier)
            errors.append(100.0 * float(np.mean(np.abs(predicted / seconds - 1.0))))
            tiers.append(tier)
        best = bus_bandwidth(op, sizes[-1], ranks, seconds[-1])
        lines.append({"system": system, "op": op, "ranks": ranks, "nodes": nodes, "alpha_us": tiers[1].alpha * 1e6,
                      "bandwidth_GBps": tiers[1].bandwidth / 1e9, "gamma_us_per_sqrt_MB": tiers[1].gamma * 1e9,
                      "error_without": errors[0], "error_with": errors[1], "largest_bus_GBps": best / 1e9})  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    lines = score()
    if parser.parse_args().json:
        print(json.dumps(lines))
        return
    heads = list(lines[0])
    print("".join(f"{h[:20]:>22}" for h in heads))
    for line in lines:
        print("".join(f"{v:22.1f}" if isinstance(v, float) else f"{v!s:>22}" for v in line.values()))
    mean = [np.mean([float(line[k]) for line in lines]) for k in ("error_without", "error_with")]
    print(f"mean error {mean[0]:.1f} % without the square root, {mean[1]:.1f} % with it")


if __name__ == "__main__":
    main()
