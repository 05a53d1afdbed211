"""verify says yes to layouts that compute what one process does, and no, with the reason, to one that does not."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from loadmaster.cli.main import main
from loadmaster.describe.cluster import Cluster
from loadmaster.describe.layout import Layout
from loadmaster.describe.plan_file import PlanFile
from loadmaster.describe.workload import Workload
from loadmaster.errors import InvalidInput
from loadmaster.runtime.verify import StepDifference, verify

TOYS = """
import torch
from torch import nn

class Toy(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.embed, self.norm = nn.Embedding(31, 12), norm
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(12, 31)
    def forward(self, input_ids):
        x = self.embed(input_ids)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = x + self.drop(block(x).tanh())
        return self.head(x)

def right(): return Toy(nn.Identity())
def batch_norm(): return Toy(nn.BatchNorm1d(12))
"""


def plan(factory: str, **layout: object) -> PlanFile:
    return PlanFile(
        name="toy", cluster=Cluster.parse("8xh100-sxm"), workload=Workload(global_batch_size=8, seq_len=16),
        layout=Layout(**layout), factory=factory,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toys.py").write_text(TOYS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.ranks
def test_a_sharded_layout_with_accumulation_agrees(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan("toys:right", dp_shard=8, zero=1, micro_batch_size=2).save(here / "plan.toml")
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(here / "plan.toml"), "--layout", "dp_shard=2,zero=3,micro_batch_size=1", "--json"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["agrees"]
    assert (found["layout"]["dp_shard"], found["layout"]["zero"], found["precision"]) == (2, 3, "fp32")
    assert len(found["steps"]) == 2
    assert all(s["gradient"] < 2e-6 and s["weight"] < 1e-5 for s in found["steps"])


@pytest.mark.ranks
def test_a_layer_that_depends_on_the_micro_batch_does_not(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan("toys:batch_norm", dp_shard=2, zero=1).save(here / "plan.toml")
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(here / "plan.toml"), "--steps", "1"])
    assert ended.value.code == 1
    shown = capsys.readouterr().out.replace("\n", " ")
    assert "does not compute the same" in shown
    assert "step 0: loss" in shown


def test_what_is_too_much_or_not_run_is_refused(here: Path) -> None:
    with pytest.raises(InvalidInput, match=r"layout\.tp = 2: is planned and priced but not run"):
        verify(plan("toys:right", tp=2))
    with pytest.raises(InvalidInput, match=r"has 64 ranks; 16 are started here at most"):
        verify(plan("toys:right", dp_shard=64))
    with pytest.raises(InvalidInput, match=r"--steps = 0: must be a whole number of at least 1"):
        verify(plan("toys:right", dp_shard=2), steps=0)


def step(**changes: object) -> StepDifference:
    same = {
        "step": 0, "loss": 2.0, "reference_loss": 2.0, "grad_norm": 1.0, "reference_grad_norm": 1.0, "gradient": 0.0,
        "worst": "w", "worst_gradient": 0.0, "weight": 0.0,
    }  # fmt: skip
    return StepDifference(**(same | changes))  # type: ignore[arg-type]


def test_case_4_2_a_sum_not_divided_is_told_from_rounding() -> None:
    assert step().agrees(1e-5)
    assert not step(loss=4.0).agrees(1e-5)
    assert not step(grad_norm=0.5).agrees(1e-5)
    assert not step(gradient=1e-3).agrees(1e-5)
    assert not step(skipped="overflow").agrees(1e-5)
    assert step(weight=None).agrees(1e-5)
