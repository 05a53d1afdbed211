"""A plan file says the same when read back, is written whole or not at all, and refuses what it is not."""

from dataclasses import replace
from pathlib import Path

import pytest

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.layout import Layout
from loadmaster.describe.plan_file import PlanFile
from loadmaster.describe.workload import Workload
from loadmaster.errors import InvalidInput
from loadmaster.ledger import Ledger

CONFIG = {"model_type": "llama", "hidden_size": 64, "head_dim": None, "rope_scaling": {"factor": 8.0, "type": "it's"}}
PLAN = PlanFile(
    name="small",
    config=CONFIG,
    cluster=replace(Cluster.parse("16xh100-sxm"), memory_cap=10**9),
    workload=Workload(global_batch_size=8, seq_len=128),
    layout=Layout(dp_shard=16, zero=3, recompute="full"),
    predicted={"memory": Ledger("bytes", {"parameters": 4, "optimizer/exp_avg": 8})},
)


def test_round_trip(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.toml")
    again = PlanFile.load(tmp_path / "plan.toml")
    assert again == PLAN
    assert again.config == CONFIG


def test_nothing_is_left_behind_when_the_folder_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be written"):
        PLAN.save(tmp_path / "absent" / "plan.toml")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("not toml", "cannot be read"),
        ("version = 9", "is not 1"),
        ("version = 1", "missing"),
        (PLAN.to_toml().replace("dp_shard = 16", "dp_shard = 0"), "at least 1"),
        (PLAN.to_toml().replace("dp_shard = 16", "dp_shared = 16"), "missing or wrong"),
    ],
)
def test_refusals(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(InvalidInput, match=match):
        PlanFile.load(tmp_path / "plan.toml")
