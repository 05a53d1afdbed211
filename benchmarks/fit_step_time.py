"""Fit the step-time law's constants: one set for each (stack, device) that published runs cover.

    python benchmarks/fit_step_time.py [PAIR ... | --intervals]   # writes describe/catalog/calibration_fitted.toml

Least squares of log(predicted / measured) with a soft-L1 loss over the shared rows of validation/. What is not free is
the catalogue's, or fixed here with its reason. Rows of the nanotron sweep that stalled are left out by the measurement
(more than 0.4 s a micro-batch beyond the law, pp > 1), as nothing in a layout says which do. scipy is needed.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from loadmaster.describe.calibration import Calibration
from measured import VALIDATION, Group, cells, errors, load, predict, stalled

OUTPUT = Path(__file__).parents[1] / "src/loadmaster/describe/catalog/calibration_fitted.toml"

# no constant may leave what is physically sensible
BOUNDS = {
    "gemm_efficiency": (0.4, 0.88), "low_efficiency": (0.2, 0.8), "fp4_efficiency": (0.1, 0.8),
    "attention_efficiency": (0.1, 0.75), "head_efficiency_whole": (0.1, 0.87), "batched_efficiency": (0.3, 0.87),
    "memory_efficiency": (0.6, 0.95), "elementwise": (0.2, 4.0), "eager": (1.0, 4.0), "cast": (0.0, 4.0),
    "logit_bytes": (4.0, 200.0), "gemm_overhead": (0.0, 1e-3), "op_floor": (0.0, 3e-4), "floor_power": (1.5, 12.0),
    "bus_efficiency": (0.5, 0.85), "nic_efficiency": (0.3, 1.0), "ring_share": (0.05, 1.0),
    "ring_share_node": (0.05, 1.0), "tp_far_efficiency": (0.1, 1.0), "tp_latency": (5e-6, 3e-4),
    "tp_exposed": (0.35, 1.5), "tp_exposed_async": (0.2, 1.5), "send_exposed": (0.2, 1.0), "ep_exposed": (0.0, 2.0),
    "ep_latency": (0.0, 3e-4), "dp_overlap": (0.0, 1.0), "dp_overlap_sharded": (0.0, 1.0), "gather_tax": (0.0, 1.0),
    "straggler": (0.0, 0.1),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What is fitted for one pair.

    Attributes:
        tables: where its rows are; free: constants that move; fixed: the others that differ from the catalogue.
        weigh: ``rows`` all alike; ``nodes`` runs on several nodes four times; ``models`` a model and precision counts
            by the root of its rows; ``small`` runs beyond 128 devices or with tp > 8 half.
        scale: errors (of the logarithm) beyond this count linearly.
        rounds: fits after each of which stalled rows are looked for again.
    """

    tables: tuple[str, ...]
    free: str
    fixed: dict[str, float] = field(default_factory=dict)
    weigh: str = "rows"
    scale: float = 0.02
    rounds: int = 1


RECIPES = ("megatron_bridge_summary", "megatron_bridge_cards", "dgxc_recipes")
FITS = {
    "megatron-deepspeed@a100-sxm-80gb": Fit(
        tables=("vtrain_a100",), weigh="nodes", scale=0.01,
        free="op_floor tp_floor head_floor floor_power score_bytes elementwise nic_efficiency ring_share "
        "ring_share_node straggler logit_bytes head_efficiency_whole tp_latency bus_efficiency",
        fixed={"gemm_efficiency": 0.88, "gemm_overhead": 0.0, "memory_efficiency": 0.9, "batched_efficiency": 0.8,
               "head_efficiency": 0.85, "op_floor": 1e-4, "tp_floor": 1.3, "head_floor": 2e-3, "floor_power": 3.0,
               "score_bytes": 32.0, "elementwise": 0.6, "nic_efficiency": 0.95, "ring_share": 0.26,
               "tp_latency": 1.9e-4, "ring_share_node": 0.9, "straggler": 0.03, "logit_bytes": 68.0,
               "head_efficiency_whole": 0.28, "tp_latency_far": 8.5e-5, "tp_far_efficiency": 0.82,
               "update_floor": 2e-3, "bus_efficiency": 0.66, "accumulate_bytes": 0.0},
    ),
    "nanotron@h100-sxm": Fit(
        tables=("ultrascale_nanotron",), weigh="small", scale=0.03, rounds=3,
        free="gemm_efficiency elementwise op_floor tp_floor tp_floor_far pipeline_floor logit_bytes bus_efficiency "
        "nic_efficiency ring_share ring_share_node straggler dp_noise tp_latency tp_latency_far tp_far_efficiency "
        "dp_overlap dp_overlap_sharded",
        fixed={"gemm_efficiency": 0.68, "attention_efficiency": 0.3, "elementwise": 2.5, "op_floor": 1.3e-4,
               "tp_floor": 0.15, "tp_floor_far": 0.92, "pipeline_floor": 0.97, "head_floor": 0.0, "logit_bytes": 44.0,
               "bus_efficiency": 0.75, "nic_efficiency": 0.54, "ring_share": 0.59, "ring_share_node": 0.32,
               "straggler": 0.012, "dp_noise": 1.1, "tp_latency": 9e-5, "tp_latency_far": 1e-3, "gemm_overhead": 0.0,
               "tp_far_efficiency": 0.4, "dp_overlap": 0.9, "dp_overlap_sharded": 0.05, "update_floor": 1e-3,
               "stall": 1.6},
    ),
    "composer@a100-sxm-80gb": Fit(
        tables=("llm_foundry_mpt",),
        free="gemm_efficiency attention_efficiency elementwise logit_bytes gather_tax gemm_overhead straggler",
        fixed={"gemm_efficiency": 0.8, "gather_tax": 0.1, "elementwise": 0.8, "head_efficiency_whole": 0.75,
               "gemm_overhead": 5e-5, "accumulate_bytes": 12.0, "nic_efficiency": 0.85, "straggler": 0.004},
    ),
    "composer@h100-sxm": Fit(
        tables=("llm_foundry_mpt",),
        free="gemm_efficiency low_efficiency attention_efficiency elementwise logit_bytes gather_tax gemm_overhead "
        "straggler",
        fixed={"gemm_efficiency": 0.64, "attention_efficiency": 0.2, "gather_tax": 0.1, "elementwise": 0.8,
               "low_efficiency": 0.5, "head_efficiency_whole": 0.6, "cast": 0.5, "gemm_overhead": 5e-5,
               "accumulate_bytes": 12.0, "nic_efficiency": 0.85, "straggler": 0.004},
    ),
    "torchtitan@h100-sxm-96gb-hbm2e": Fit(
        tables=("torchtitan",), weigh="models",
        free="gemm_efficiency low_efficiency attention_efficiency elementwise eager tp_exposed tp_exposed_async cast",
        fixed={"gemm_efficiency": 0.6, "low_efficiency": 0.5, "attention_efficiency": 0.3, "eager": 1.5, "cast": 0.5},
    ),
    "megatron@h100-sxm": Fit(
        tables=RECIPES, weigh="models", scale=0.03,
        free="gemm_efficiency low_efficiency elementwise cast tp_exposed send_exposed ep_exposed dp_overlap_sharded",
        fixed={"attention_efficiency": 0.5, "gemm_overhead": 0.0, "ep_latency": 3e-4, "op_floor": 8e-5, "cast": 0.2,
               "straggler": 0.0},
    ),
    "megatron@a100-sxm-80gb": Fit(
        tables=("papers",), weigh="models", scale=0.05,
        free="gemm_efficiency elementwise tp_exposed straggler",
        fixed={"gemm_efficiency": 0.75, "gemm_overhead": 0.0, "op_floor": 1e-4},
    ),
    "megatron@gb200": Fit(
        tables=RECIPES, weigh="models", scale=0.03,
        free="gemm_efficiency low_efficiency fp4_efficiency ep_exposed send_exposed",
        fixed={"attention_efficiency": 0.4, "gemm_overhead": 0.0, "ep_latency": 3e-4, "op_floor": 8e-5, "cast": 0.2,
               "tp_exposed": 0.4, "dp_overlap_sharded": 0.75, "send_exposed": 0.3},
    ),
    "megatron@gb300": Fit(
        tables=RECIPES, weigh="models", scale=0.03,
        free="low_efficiency fp4_efficiency ep_exposed",
        fixed={"attention_efficiency": 0.4, "gemm_overhead": 0.0, "ep_latency": 3e-4, "op_floor": 8e-5, "cast": 0.2,
               "tp_exposed": 0.4, "dp_overlap_sharded": 0.75, "send_exposed": 0.3, "gemm_efficiency": 0.66},
    ),
    "megatron@b200": Fit(
        tables=(*RECIPES, "simumax_b200"), weigh="models", scale=0.03,
        free="gemm_efficiency low_efficiency ep_exposed tp_exposed",
        fixed={"attention_efficiency": 0.4, "gemm_overhead": 0.0, "ep_latency": 3e-4, "op_floor": 8e-5, "cast": 0.2,
               "tp_exposed": 0.4, "dp_overlap_sharded": 0.75, "send_exposed": 0.3},
    ),
    "megatron@b300": Fit(
        tables=RECIPES, weigh="models", scale=0.03,
        free="low_efficiency ep_exposed",
        fixed={"attention_efficiency": 0.4, "gemm_overhead": 0.0, "ep_latency": 3e-4, "op_floor": 8e-5, "cast": 0.2,
               "tp_exposed": 0.4, "dp_overlap_sharded": 0.75, "send_exposed": 0.3, "gemm_efficiency": 0.65},
    ),
}  # fmt: skip


def weights(fit: Fit, groups: list[Group]) -> np.ndarray:
    """Weight of each row, by the fit's rule."""
    devices = cells(groups, "n_gpus").astype(float)
    match fit.weigh:
        case "nodes":
            return np.where(devices > 8, 4.0, 1.0)
        case "small":
            return np.where((devices <= 128) & (cells(groups, "tp").astype(int) <= 8), 1.0, 0.5)
        case "models":
            names = [(r["model"], g.columns.precision) for g in groups for r in g.rows]
            count = Counter(names)
            return np.array([3.0 / count[name] ** 0.5 for name in names])
        case _:
            return np.ones(len(devices))


def solve(start: Calibration, fit: Fit, groups: list[Group], weight: np.ndarray) -> Calibration:
    """The free constants that fit best."""
    names = fit.free.split()
    first = np.array([getattr(start, n) for n in names])
    unit = np.where(first > 0, first, 1e-3)
    low, high = (np.array([BOUNDS.get(n, (0.0, np.inf))[i] for n in names]) / unit for i in (0, 1))

    def residuals(scaled: np.ndarray) -> np.ndarray:
        predicted, measured = predict(groups, start.changed(**dict(zip(names, scaled * unit, strict=True))))
        return np.log(predicted / measured) * weight

    found = least_squares(residuals, np.clip(first / unit, low + 1e-9, high - 1e-9), bounds=(low, high), loss="soft_l1",
                          f_scale=fit.scale, diff_step=1e-3, max_nfev=60)  # fmt: skip
    return start.changed(**dict(zip(names, (found.x * unit).tolist(), strict=True)))


def fit_pair(pair: str, fit: Fit) -> dict[str, object]:
    """Constants of a pair with their provenance, as the table of the catalogue."""
    stack, device = pair.split("@")
    tables = [[g for g in load(t)[0] if g.cluster.device.name == device and g.stack.name == stack] for t in fit.tables]
    groups = [g for table in tables for g in table]
    constants = Calibration.of(device, stack).changed(**fit.fixed)
    base = weights(fit, groups)
    keep = np.ones(len(base), dtype=bool)
    for _ in range(fit.rounds):
        if fit.rounds > 1:
            keep = ~stalled(groups, *predict(groups, constants))
        constants = solve(constants, fit, groups, base * keep)
    predicted, measured = predict(groups, constants)
    if fit.rounds > 1:
        keep = ~stalled(groups, predicted, measured)
    error = errors(predicted[keep], measured[keep])
    values = {n: float(f"{getattr(constants, n):.4g}") for n in {*fit.free.split(), *fit.fixed}}
    return {
        **dict(sorted(values.items())),
        "source": f"{int(error['rows'])} rows of {', '.join(fit.tables)}; mean error {error['mean']:.1f} %, median "
        f"{error['median']:.1f} %; free: {fit.free}",
    }  # fmt: skip


def intervals() -> dict[str, tuple[float, float]]:
    """5th and 95th percentile of measured over predicted for each pair with five rows or more, fitted or not.

    A table counts by the root of its rows, so that one site's sweep does not speak for all; percentiles of the
    logarithm are widened by a quarter, as runs that were not fitted err about that much more; 1 stays well inside.
    Megatron-LM's functional tests run tiny deterministic models: their source says not to use their speed.
    """
    ratios: dict[str, list[tuple[float, float]]] = {}
    for path in sorted(VALIDATION.glob("*.tsv")):
        groups = load(path.stem)[0] if path.stem != "megatron_lm_golden" else []
        if not groups:
            continue
        predicted, measured = predict(groups)
        pairs = np.array([f"{g.stack.name}@{g.cluster.device.name}" for g in groups for _ in g.rows])
        quick = ~stalled(groups, predicted, measured)
        for pair in np.unique(pairs[quick]):
            found = np.log(measured / predicted)[quick & (pairs == pair)]
            ratios.setdefault(str(pair), []).extend((float(r), len(found) ** -0.5) for r in found)
    return {pair: _percentiles(rows) for pair, rows in ratios.items() if len(rows) >= 5}


def _percentiles(rows: list[tuple[float, float]]) -> tuple[float, float]:
    values, weight = np.array(sorted(rows)).T
    share = (np.cumsum(weight) - weight / 2) / weight.sum()
    low, high = np.interp([0.05, 0.95], share, values)
    # with few rows the extremes are not known: as if one more lay a third further out
    wider = 1.25 * (1.0 + 1.0 / len(values))
    return round(float(np.exp(min(wider * low, -0.03))), 3), round(float(np.exp(max(wider * high, 0.03))), 3)


def render(tables: dict[str, dict[str, object]]) -> str:
    """TOML of the fitted catalogue."""
    lines = ["# Written by benchmarks/fit_step_time.py; not by hand; meanings: describe/calibration.py."]
    for pair, table in tables.items():
        lines += ["", f'["{pair}"]', *([f'source = "{table["source"]}"'] if "source" in table else [])]
        lines += [f"{name} = {value!r}" for name, value in table.items() if name != "source"]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    fitted = tomllib.loads(OUTPUT.read_text(encoding="utf-8")) if OUTPUT.exists() else {}
    for pair in [] if arguments == ["--intervals"] else arguments or FITS:
        fitted[pair] = fit_pair(pair, FITS[pair])
        print(f"{pair}: {fitted[pair]['source']}")
    OUTPUT.write_text(render(fitted), encoding="utf-8")
    Calibration.reread()
    for pair, (low, high) in intervals().items():
        fitted[pair] = {**fitted.get(pair, {}), "low": low, "high": high}
        print(f"{pair}: 90 % within {low} .. {high}")
    OUTPUT.write_text(render(dict(sorted(fitted.items()))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
