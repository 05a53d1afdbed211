"""The three-term law of a tier on published nccl-tests curves."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import loadmaster as lm
from collectives import score
from loadmaster.laws.collectives import Tier


def test_the_square_root_halves_the_error_of_published_curves() -> None:
    lines = score()
    without, with_root = (np.array([line[k] for line in lines]) for k in ("error_without", "error_with"))
    assert len(lines) >= 8
    assert with_root.max() < 11
    assert with_root.mean() < 0.55 * without.mean()


def test_the_catalogue_states_the_fitted_start_up_of_nvlink() -> None:
    curve = next(line for line in score() if line["system"] == "h100-8x-dgxc")
    tier = Tier.of(lm.Cluster.parse("8xh100-sxm").intra_node)
    assert abs(tier.alpha * 1e6 - float(curve["alpha_us"])) < 2
    assert abs(tier.gamma * 1e9 - float(curve["gamma_us_per_sqrt_MB"])) < 1
