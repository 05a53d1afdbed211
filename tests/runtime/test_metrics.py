"""metrics.jsonl holds each step once, whatever was cut off or run again; TensorBoard gets the same."""

import json
from pathlib import Path

import pytest

from loadmaster.errors import InvalidInput
from loadmaster.runtime.metrics import Metrics, StepRecord, read_metrics
from loadmaster.runtime.progress import describe_step


def record(step: int, **given: float | None) -> StepRecord:
    fields = {
        "loss": 2.0, "grad_norm": 1.0, "tokens": 8, "tokens_per_second": 4.0, "mfu": None, "memory_bytes": 1024,
        "peak_bytes": 2048, "loss_scale": None, "seconds": 2.0, "learning_rate": 1e-3, "flops_per_second": 1e9,
    }  # fmt: skip
    return StepRecord(step=step, **{**fields, **given})


def test_a_resumed_run_goes_on_after_its_step(tmp_path: Path) -> None:
    with Metrics(tmp_path, tensorboard=True) as metrics:
        for step in range(1, 6):
            metrics.write(record(step, loss=float("nan") if step == 2 else 2.0))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed while it wrote
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    with Metrics(tmp_path, first_step=3, tensorboard=False) as metrics:
        metrics.write(record(4, loss=1.0))
    rows = read_metrics(tmp_path)
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 2.0), (2, None), (3, 2.0), (4, 1.0)]
    wanted = {"step", "loss", "grad_norm", "tokens", "tokens_per_second", "mfu", "memory_bytes", "peak_bytes"}
    assert wanted | {"loss_scale", "seconds"} <= rows[0].keys()
    assert list((tmp_path / "tensorboard").glob("events.*"))
    (tmp_path / "metrics.jsonl").write_text("{\n" + json.dumps({"step": 1}) + "\n")
    with pytest.raises(InvalidInput, match=r"metrics.jsonl:1"):
        read_metrics(tmp_path)


def test_no_percentage_without_a_peak() -> None:
    assert "MFU" not in describe_step(record(1))
    assert "1.00 GFLOP/s a rank" in describe_step(record(1))
    assert "40.0% MFU" in describe_step(record(1, mfu=0.4))
