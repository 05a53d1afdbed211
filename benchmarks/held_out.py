"""Do the step-time constants carry over to a model they were not fitted on? Leave one width out, refit, score it.

    python benchmarks/held_out.py [PAIR ...]     # a few minutes a pair

Each hidden size of a pair's rows is left out in turn; the constants are fitted on the others (as fit_step_time.py does)
and the left-out rows are scored, those of the nanotron sweep that stalled apart.
"""

from __future__ import annotations

import sys

import numpy as np

from fit_step_time import FITS, solve, weights
from loadmaster.describe.calibration import Calibration
from measured import cells, errors, load, predict, stalled

PAIRS = ("megatron-deepspeed@a100-sxm-80gb", "nanotron@h100-sxm", "composer@a100-sxm-80gb", "composer@h100-sxm")


def held_out(pair: str) -> dict[str, dict[str, float]]:
    """Errors on each width left out."""
    stack, device = pair.split("@")
    fit = FITS[pair]
    tables = [load(t)[0] for t in fit.tables]
    groups = [g for table in tables for g in table if g.cluster.device.name == device and g.stack.name == stack]
    found = {}
    for width in sorted({g.rows[0]["hidden"] for g in groups}, key=int):
        rest = [g for g in groups if g.rows[0]["hidden"] != width]
        constants = Calibration.of(device, stack).changed(**fit.fixed)
        for _ in range(fit.rounds):
            keep = np.ones(len(cells(rest, "tp")), dtype=bool)
            if fit.rounds > 1:
                keep = ~stalled(rest, *predict(rest, constants))
            constants = solve(constants, fit, rest, weights(fit, rest) * keep)
        left = [g for g in groups if g.rows[0]["hidden"] == width]
        predicted, measured = predict(left, constants)
        quick = ~stalled(left, predicted, measured)
        found[width] = errors(predicted[quick], measured[quick])
    return found


def main(pairs: list[str]) -> None:
    for pair in pairs or PAIRS:
        for width, figures in held_out(pair).items():
            line = ", ".join(f"{name} {value:.1f}" for name, value in figures.items())
            print(f"{pair}: hidden {width} left out: {line}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
