"""The step-time law: one law for one layout or a column of them, every term, and the schedules as its oracle."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import loadmaster as lm
from loadmaster.describe.calibration import Calibration
from loadmaster.laws.step import step_interval, time_terms
from loadmaster.program.schedule import build_schedule

MODEL = lm.Model.from_hf("meta-llama/Meta-Llama-3-8B")
CLUSTER = lm.Cluster.parse("64xh100-sxm")
WORK = lm.Workload(global_batch_size=256, seq_len=4096)
TERMS = {
    "forward", "backward", "recompute", "communication/tp", "communication/cp", "communication/ep", "communication/pp",
    "communication/dp_shard", "communication/dp_replicate", "host", "straggler", "bubble", "accumulate", "optimizer",
}  # fmt: skip


def seconds(layout: Any, *, model: lm.Model = MODEL, stack: str = "megatron", **changes: Any) -> float:
    cluster = dataclasses.replace(CLUSTER, **changes)
    return sum(time_terms(model, cluster, WORK, layout, lm.Stack.named(stack)).values())


LAYOUTS = [
    lm.Layout(dp_shard=64, zero=1),
    lm.Layout(dp_shard=8, tp=8, zero=3, sequence_parallel=True),
    lm.Layout(dp_shard=4, dp_replicate=2, tp=2, pp=4, micro_batch_size=4),
    lm.Layout(dp_shard=8, cp=2, pp=4, zero=2, micro_batch_size=2),
]


@pytest.mark.parametrize("stack", ["megatron", "nanotron", "loadmaster"])
def test_a_column_of_layouts_prices_as_each_alone(stack: str) -> None:
    columns = SimpleNamespace(**LAYOUTS[0].to_dict())
    for field, value in LAYOUTS[0].to_dict().items():
        if not isinstance(value, str):
            setattr(columns, field, np.array([getattr(x, field) for x in LAYOUTS]))
    together = time_terms(MODEL, CLUSTER, WORK, columns, lm.Stack.named(stack))
    for i, layout in enumerate(LAYOUTS):
        alone = time_terms(MODEL, CLUSTER, WORK, layout, lm.Stack.named(stack))
        assert set(alone) == TERMS
        for name, value in alone.items():
            assert value >= 0, name
            assert np.broadcast_to(together[name], len(LAYOUTS))[i] == pytest.approx(value, rel=1e-12), name


def test_long_columns_are_priced_in_pieces_without_a_seam() -> None:
    columns = SimpleNamespace(**lm.Layout().to_dict())
    columns.tp = np.tile([1, 2, 4, 8], 8192)
    terms = time_terms(MODEL, CLUSTER, WORK, columns, lm.Stack.named("megatron"))
    total = np.sum([np.broadcast_to(v, columns.tp.shape) for v in terms.values()], axis=0)
    assert all(len(np.unique(total[i::4])) == 1 for i in range(4))


@given(st.lists(st.floats(0.5, 3.0), min_size=2, max_size=6), st.integers(1, 4))
def test_the_slowest_stage_sets_the_beat(stages: list[float], times: int) -> None:
    # closed form of the law: m slowest + (all stages - slowest), against the replay of the table
    pp, m = len(stages), len(stages) * times
    replay = build_schedule("1f1b", pp=pp, num_micro_batches=m).replay(lambda s: stages[s], lambda s: 2 * stages[s])
    closed = 3 * (m * max(stages) + sum(stages) - max(stages))
    # an early slow stage runs its warm-up forwards while it would wait: the closed form is then an upper bound
    assert 3 * m * max(stages) <= replay.seconds + 1e-9
    assert replay.seconds <= closed + 1e-9
    if stages[-1] == max(stages):  # the usual case: the head makes the last one the slowest
        assert replay.seconds == pytest.approx(closed)


def test_what_should_cost_more_does() -> None:
    plain = lm.Layout(dp_shard=8, tp=4, pp=2, zero=1)
    full = lm.Layout(dp_shard=8, tp=4, pp=2, zero=1, recompute="full")
    selective = lm.Layout(dp_shard=8, tp=4, pp=2, zero=1, recompute="selective")
    blocks = lm.Layout(dp_shard=8, tp=4, pp=2, zero=1, recompute="blocks", recompute_blocks=8)
    assert seconds(plain) < seconds(selective) < seconds(blocks) < seconds(full)
    assert seconds(lm.Layout(dp_shard=32, tp=2)) > seconds(lm.Layout(dp_shard=32, tp=2, micro_batch_size=2)) * 0.8
    slow = dataclasses.replace(CLUSTER.inter_node, bandwidth=CLUSTER.inter_node.bandwidth / 10)
    assert seconds(plain, inter_node=slow) > seconds(plain)
    # ZeRO 3 gathers every micro-batch: on a slow network it costs, ZeRO 1 does not
    sharded = [seconds(lm.Layout(dp_shard=64, zero=z), inter_node=slow) for z in (1, 3)]
    assert sharded[0] < sharded[1]


def test_interleaving_and_zero_bubble_shrink_the_bubble() -> None:
    def bubble(**fields: Any) -> float:
        layout = lm.Layout(dp_shard=16, pp=4, **fields)
        return float(time_terms(MODEL, CLUSTER, WORK, layout, lm.Stack.named("megatron"))["bubble"])

    plain = bubble()
    assert bubble(schedule="interleaved_1f1b", virtual_stages=2) == pytest.approx(plain / 2, rel=0.2)
    assert bubble(schedule="zb_h1") < plain / 2
    assert bubble(schedule="zb_v", virtual_stages=2) < bubble(schedule="zb_h1")


def test_small_models_meet_the_host() -> None:
    # GPU work of a tiny layer is far below what the host needs to launch it: a larger micro-batch is nearly free
    tiny = lm.Model.from_hf({
        "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4,
        "intermediate_size": 1024, "vocab_size": 1024,
    })  # fmt: skip
    work = lm.Workload(global_batch_size=64, seq_len=256)
    one, two = (
        time_terms(tiny, CLUSTER, work, lm.Layout(dp_shard=8, micro_batch_size=b), lm.Stack.named("nanotron"))
        for b in (1, 2)
    )
    assert one["host"] > one["forward"] + one["backward"]
    assert sum(two.values()) == pytest.approx(sum(one.values()) / 2, rel=0.1)


def test_experts_and_narrow_products_are_priced() -> None:
    mixture = lm.Model.from_hf("mistralai/Mixtral-8x7B-v0.1")
    layout = lm.Layout(dp_shard=32, tp=2, ep=8, zero=1)
    terms = time_terms(mixture, CLUSTER, WORK, layout, lm.Stack.named("megatron"))
    assert terms["communication/ep"] > 0
    narrow = dataclasses.replace(layout, precision="fp8-master")
    wide = dataclasses.replace(layout, precision="bf16-master")
    assert seconds(narrow, model=mixture) < seconds(wide, model=mixture)


def test_an_unknown_device_is_priced_from_its_own_figures_with_a_wide_interval() -> None:
    device = dataclasses.replace(CLUSTER.device, name="mystery", peak_flops={"bf16": 1e14})
    strange = dataclasses.replace(CLUSTER, device=device)
    layout, stack = lm.Layout(dp_shard=64), lm.Stack.named("megatron")
    terms = time_terms(MODEL, strange, WORK, layout, stack)
    low, high = step_interval(strange, stack, WORK, layout, sum(terms.values()))
    assert sum(terms.values()) > seconds(layout)
    assert high / low > 2


def test_constants_say_where_they_come_from() -> None:
    fitted = Calibration.of("a100-sxm-80gb", "megatron-deepspeed")
    assert "vtrain_a100" in fitted.source
    assert Calibration.of("no such device", "no such stack").source.startswith("no run")


def test_a_vision_model_is_priced_by_its_patches_whatever_the_workload_says() -> None:
    vit, stack, layout = lm.Model.from_hf("google/vit-base-patch16-224"), lm.Stack.named("loadmaster"), lm.Layout()
    times = [
        sum(time_terms(vit, CLUSTER, lm.Workload(global_batch_size=256, seq_len=s), layout, stack).values())
        for s in (1, 4096)
    ]
    assert times[0] == pytest.approx(times[1], rel=1e-9)


def test_buckets_and_an_update_on_the_host_cost_time() -> None:
    small, large = (
        seconds(lm.Layout(dp_replicate=64, bucket_bytes=b), stack="loadmaster") for b in (1 << 16, 64 << 20)
    )
    assert small > large  # a start-up each
    away, here = (seconds(lm.Layout(dp_shard=64, zero=1, offload_optimizer=o)) for o in (True, False))
    assert away > here
