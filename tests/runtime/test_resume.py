"""A run resumed gives what an unbroken one gives: on the same ranks bit for bit, on others to rounding."""

import math
import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from forked import plan_payload, train_forked, write_inputs

from loadmaster.errors import InvalidInput
from loadmaster.runtime.checkpoint import Checkpoint

pytestmark = pytest.mark.ranks
OTHERS = (
    "dp_shard=1",
    "dp_shard=2,zero=3",
    "dp_shard=3,zero=2",
    "dp_shard=6,zero=1",
    "dp_replicate=2,dp_shard=2,zero=3",
)


def degree(layout: str) -> int:
    return math.prod(int(part.split("=")[1]) for part in layout.split(",") if part.startswith("dp_"))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps on four ranks, optimizer sharded, saved after five and ten."""
    folder = tmp_path_factory.mktemp("unbroken")
    write_inputs(folder)
    payload = plan_payload("run", layout="dp_shard=4,zero=1", save_every=5, keep=9)
    losses = train_forked(payload, world_size=4, folder=folder)["losses"]
    assert len(losses) == 10
    assert losses[-1] < 0.9 * losses[0]
    (folder / "losses").write_text("\n".join(map(repr, losses)))
    return folder


@pytest.mark.parametrize("layout", OTHERS)
def test_saved_on_four_ranks_resumed_on_others(unbroken: Path, layout: str) -> None:
    payload = plan_payload(f"to {layout}", layout=layout, resume_from="run/checkpoints/step-00000005")
    losses = train_forked(payload, world_size=degree(layout), folder=unbroken)["losses"]
    expected = [float(line) for line in (unbroken / "losses").read_text().splitlines()][5:]
    assert losses == pytest.approx(expected, rel=1e-6)
    there = Checkpoint.open(unbroken / f"to {layout}" / "checkpoints" / "step-00000010")
    here = Checkpoint.open(unbroken / "run" / "checkpoints" / "step-00000010")
    assert there.shapes == here.shapes
    assert {kind for kind, _ in here.shapes} == {"param", "exp_avg", "exp_avg_sq", "step"}
    for kind, name in here.shapes:
        torch.testing.assert_close(there.whole(name, kind), here.whole(name, kind), rtol=1e-5, atol=1e-7)


def test_resumed_on_the_same_ranks_bit_for_bit_with_dropout(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    layout, dropout = "dp_shard=2,zero=2", {"TINY_DROPOUT": "0.3"}
    whole = plan_payload("whole", layout=layout, save_every=4, keep=9, asynchronous=True, eval_every=4)
    expected = train_forked(whole, world_size=2, folder=tmp_path, **dropout)
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken" / "checkpoints" / "step-00000008")
    shutil.rmtree(tmp_path / "broken" / "checkpoints" / "step-00000010")
    again = train_forked({**whole, "out": "broken", "resume": "yes"}, world_size=2, folder=tmp_path, **dropout)
    assert again["losses"] == expected["losses"][4:]
    assert again["eval_loss"] == expected["eval_loss"]
    lines = [(tmp_path / run / "metrics.jsonl").read_text().splitlines() for run in ("whole", "broken")]
    assert len(lines[0]) == len(lines[1]) == 10


def test_what_does_not_fit_is_refused(unbroken: Path) -> None:
    def refuse(match: str, **given: object) -> None:
        payload = plan_payload("other", layout="dp_shard=1", **{"resume_from": "run", "steps": 20, **given})
        with pytest.raises(InvalidInput, match=match):
            train_forked(payload, world_size=1, folder=unbroken)

    refuse("this run has 1", seed=1)
    refuse("of step 10 already", steps=10)
    refuse("holds no checkpoint", resume_from="nowhere")


def test_bf16_weights_with_masters_resume_bit_for_bit(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    whole = plan_payload("whole", layout="dp_shard=1", steps=6, save_every=3, keep=9)
    whole["layout"]["precision"] = "bf16-master"
    expected = train_forked(whole, world_size=1, folder=tmp_path)["losses"]
    part = {**whole, "out": "part", "resume_from": "whole/checkpoints/step-00000003"}
    assert train_forked(part, world_size=1, folder=tmp_path)["losses"] == expected[3:]
    saved = Checkpoint.open(tmp_path / "part" / "checkpoints" / "step-00000006")
    assert saved.whole("head.weight").dtype == torch.bfloat16
    assert saved.whole("head.weight", "master").dtype == torch.float32
