"""The README's demo, its own script, at reduced size: what `make demo` shows is asserted here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import loadmaster as lm
from loadmaster.describe.plan_file import PlanFile

ROOT = Path(__file__).parents[1]
STEPS = 6


@pytest.mark.slow
@pytest.mark.ranks
def test_the_demo_runs_and_its_prediction_holds(tmp_path: Path) -> None:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "loadmaster").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m loadmaster "$@"\n')
    (binaries / "loadmaster").chmod(0o755)
    path = os.pathsep.join([str(binaries), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("OMP_NUM_THREADS", None)
    demo = subprocess.run(
        [str(ROOT / "examples" / "demo.sh"), str(tmp_path / "demo"), str(STEPS)], env=environment, capture_output=True,
        text=True, timeout=280, check=False,
    )  # fmt: skip
    assert demo.returncode == 0, demo.stdout[-3000:] + demo.stderr[-3000:]
    assert "Traceback" not in demo.stdout + demo.stderr
    assert "Does not fit" in demo.stdout
    typed = [line for line in demo.stdout.splitlines() if "$ loadmaster" in line]
    assert [line.split()[2] for line in typed] == ["measure", "price", "plan", "train", "compare"]

    folder = tmp_path / "demo"
    cluster, plan = lm.Cluster.load(folder / "here.toml"), PlanFile.load(folder / "plan.toml")
    assert cluster.num_devices == plan.layout.world_size == 2
    assert cluster.device.measured

    ledger = json.loads((folder / "run" / "ledger.json").read_text())
    predicted, measured = (ledger[side]["memory"]["terms"] for side in ("predicted", "measured"))
    for term in ("parameters", "gradients", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
        assert predicted[term] == measured[term] > 0
    assert ledger["predicted"]["traffic"]["terms"] == ledger["measured"]["traffic"]["terms"]
    peaks = [ledger[side]["memory"]["total"] for side in ("predicted", "measured")]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.02)
    assert peaks[1] < plan.cluster.memory_bytes

    losses = [json.loads(line)["loss"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.5  # six steps; the demo's hundred go far below the unigram entropy
