"""The closed form of a pipeline's time against its replay, action by action."""

from typing import Any

import pytest

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.layout import Layout
from loadmaster.describe.model import Model
from loadmaster.describe.stack import Stack
from loadmaster.describe.workload import Workload
from loadmaster.laws.cost import price
from loadmaster.planner.replay import better_split, replayed_seconds

MODEL = Model.from_hf("meta-llama/Llama-3.1-70B")
WORK = Workload(global_batch_size=64, seq_len=4096)
MEGATRON = Stack.named("megatron")


@pytest.mark.parametrize(
    ("fields", "tolerance"),
    [
        ({"pp": 2}, 1e-3),
        ({"pp": 8}, 1e-3),
        ({"pp": 16}, 1e-3),
        ({"pp": 8, "schedule": "gpipe"}, 1e-3),
        ({"pp": 8, "recompute": "full", "micro_batch_size": 2}, 1e-3),
        ({"pp": 8, "schedule": "interleaved_1f1b", "virtual_stages": 2}, 2e-3),
        ({"pp": 4, "schedule": "interleaved_1f1b", "virtual_stages": 5}, 2e-3),
        ({"pp": 8, "schedule": "zb_h1"}, 5e-3),
        ({"pp": 8, "schedule": "zb_v", "virtual_stages": 2}, 3e-2),
    ],
    ids=str,
)
def test_closed_form_is_the_replay(fields: dict[str, Any], tolerance: float) -> None:
    layout = Layout(dp_shard=32 // fields["pp"], tp=4, zero=1, sequence_parallel=True, **fields)
    cost = price(MODEL, Cluster.parse("128xh100-sxm"), WORK, layout, stack=MEGATRON)
    assert cost.step_seconds == pytest.approx(replayed_seconds(cost, MEGATRON), rel=tolerance)


def test_one_stage_has_nothing_to_replay() -> None:
    cost = price(MODEL, Cluster.parse("128xh100-sxm"), WORK, Layout(dp_shard=32, tp=4, zero=1), stack=MEGATRON)
    assert replayed_seconds(cost, MEGATRON) == cost.step_seconds


def test_the_head_is_worth_layers() -> None:
    """A vocabulary of 128k beside sixteen layers: the last stage is better off with fewer of them."""
    model = Model.from_hf("meta-llama/Llama-3.2-1B")
    cost = price(model, Cluster.parse("8xh100-sxm"), WORK, Layout(pp=4, dp_shard=2, zero=1), stack=MEGATRON)
    found = better_split(cost, MEGATRON, float(cost.cluster.memory_bytes))
    assert found is not None
    split, seconds = found
    assert sum(split) == model.num_layers
    assert split[-1] < split[0]
    assert seconds < replayed_seconds(cost, MEGATRON)
    assert better_split(cost, MEGATRON, float(cost.memory.total)) is None  # the longer stages would not fit
