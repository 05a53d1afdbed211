"""The search: its columns price as single layouts do, its best is the best, its refusals and trades hold."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.layout import Layout
from loadmaster.describe.model import Model
from loadmaster.describe.plan_file import PlanFile
from loadmaster.describe.stack import Stack
from loadmaster.describe.workload import Workload
from loadmaster.errors import InvalidInput
from loadmaster.laws.cost import price
from loadmaster.planner.explain import explain, smallest_cluster
from loadmaster.planner.objective import search
from loadmaster.planner.priced import TIE, legal_rows, price_space
from loadmaster.planner.search import ability_of, plan
from loadmaster.planner.space import ABILITIES, degrees, expand
from loadmaster.program.dimensions import Dimensions

MODEL = Model.from_hf("meta-llama/Llama-3.2-1B")
CLUSTER = Cluster.parse("16xh100-sxm")
WORK = Workload(global_batch_size=64, seq_len=2048)


def priced(stack_name: str, model: Model = MODEL) -> Any:
    stack = Stack.named(stack_name)
    dims, ability = Dimensions.of(model), ability_of(stack, None)
    base = degrees(dims, CLUSTER.num_devices, ability, WORK)
    groups = expand(
        base.take(legal_rows(dims, WORK, base, CLUSTER)), dims, ability, optimizer_bits=(32,), precision="bf16-mixed"
    )
    return price_space(model, CLUSTER, WORK, stack, dims, groups)


@pytest.mark.parametrize("stack", ["loadmaster", "megatron", "torchtitan", "nanotron"])
def test_columns_price_as_single_layouts(stack: str) -> None:
    space = priced(stack)
    rows = np.random.default_rng(0).choice(len(space), size=min(40, len(space)), replace=False)
    for row in rows:
        cost = price(MODEL, CLUSTER, WORK, space.layout(int(row)), stack=stack)
        # a column has the closed form; one layout of our runtime is counted from its tables, padding included
        within = 2e-2 if stack == "loadmaster" else 1e-6
        assert cost.memory.total == pytest.approx(space.bytes[row], rel=within), cost.layout.describe()
        assert cost.step_seconds == pytest.approx(space.seconds[row], rel=1e-6), cost.layout.describe()


@pytest.mark.parametrize("stack", list(ABILITIES))
def test_no_layout_stands_twice_in_the_space(stack: str) -> None:
    space = priced(stack)
    layouts = [space.layout(row) for row in range(min(len(space), 3000))]
    assert len(set(layouts)) == len(layouts)


def test_the_space_holds_every_legal_combination_of_degrees() -> None:
    space = priced("megatron")
    found = {(lay.tp, lay.pp, lay.cp, lay.dp) for lay in map(space.layout, range(len(space)))}
    wanted = set()
    for tp, pp, cp in itertools.product((1, 2, 4, 8, 16), repeat=3):
        if 16 % (tp * pp * cp) == 0 and tp <= 8:
            wanted.add((tp, pp, cp, 16 // (tp * pp * cp)))
    assert found == wanted


def test_the_best_is_the_fastest_that_fits() -> None:
    result = plan(MODEL, CLUSTER, WORK, stack="megatron")
    space = priced("megatron")
    assert result.best is not None
    fastest = space.seconds[space.fits].min()
    seconds = [p.cost.step_seconds for p in result.plans]
    assert seconds[0] <= fastest * (1 + TIE + 1e-6)
    assert all(a <= b * 1.02 for a, b in itertools.pairwise(seconds))  # ranked by replay, a little off the law


def test_of_equals_the_simplest_comes_first() -> None:
    space = priced("torchtitan")
    even = replace(space, seconds=np.ones(len(space)), bytes=np.ones(len(space)))
    first = even.layout(int(even.best(1)[0]))
    assert sum(d > 1 for d in (first.tp, first.pp, first.cp, first.dp_replicate, first.dp_shard)) == 1
    assert first.recompute == "none"
    slower = replace(even, seconds=np.where(np.arange(len(space)) == 7, 0.9, 1.0))
    assert slower.best(1)[0] == 7


def test_nothing_on_the_front_is_beaten() -> None:
    result = plan(MODEL, CLUSTER, WORK, stack="megatron")
    points = [(seconds, size) for _, size, seconds in result.front]
    assert points == sorted(points)
    assert all(a[1] > b[1] for a, b in itertools.pairwise(points))


def test_a_tight_cap_makes_the_plan_cut_something() -> None:
    free = plan(MODEL, CLUSTER, WORK).best
    assert free is not None
    tight = replace(CLUSTER, memory_cap=int(free.cost.memory.total * 0.7))
    result = plan(MODEL, tight, WORK)
    assert result.best is not None
    assert result.best.cost.memory.total <= tight.memory_bytes
    assert result.best.cost.out_of_memory_probability <= 0.1
    refused = [r for r in result.rejections if r.shortfall]
    assert refused
    assert all(r.way_out for r in refused)


def test_eight_bits_only_where_nothing_else_fits() -> None:
    result = plan(MODEL, CLUSTER, WORK)
    assert all(p.layout.optimizer_bits == 32 for p in result.plans)
    one = Cluster.parse("h100-sxm")
    lean = price(MODEL, one, WORK, Layout(recompute="full", optimizer_bits=8)).memory.total
    result = plan(MODEL, replace(one, memory_cap=int(lean * 1.12)), WORK)
    assert result.best is not None
    assert result.best.layout.optimizer_bits == 8
    assert any("8 bits" in note for note in result.notes)


def test_remedies_do_what_they_say() -> None:
    cost = price(MODEL, CLUSTER, WORK, Layout(dp_shard=16, zero=1, micro_batch_size=4))
    from loadmaster.planner.remedies import remedies

    found = remedies(cost)
    assert found
    assert [r.worth for r in found] == sorted((r.worth for r in found), reverse=True)
    for remedy in found:
        work = replace(WORK, loss="fused") if remedy.change == "loss=fused" else WORK
        other = price(MODEL, CLUSTER, work, remedy.layout)
        assert cost.memory.total - other.memory.total == remedy.bytes_saved > 0


def test_an_explanation_surrounds_the_best() -> None:
    result = plan(MODEL, CLUSTER, WORK, stack="megatron")
    told = explain(result)
    assert result.best is not None
    assert len(told.trades) == len(result.plans) - 1
    assert all(t.seconds_added >= -0.02 * result.best.cost.step_seconds for t in told.trades)
    assert all(seconds <= result.best.cost.step_seconds * (1 + 1e-9) for _, seconds in told.bandwidth)
    assert told.smallest_devices == 1


def test_the_smallest_cluster_fits_and_half_of_it_does_not() -> None:
    big = Model.from_hf("meta-llama/Llama-3.1-70B")
    stack = Stack.named("megatron")
    devices = smallest_cluster(big, Cluster.parse("1024xh100-sxm"), WORK, stack)
    assert devices is not None
    assert plan(big, Cluster.parse(f"{devices}xh100-sxm"), WORK, stack=stack).best is not None
    assert plan(big, Cluster.parse(f"{devices // 2}xh100-sxm"), WORK, stack=stack).best is None


def test_objectives() -> None:
    fewest = search(MODEL, CLUSTER, WORK, objective="devices")
    assert fewest.cluster.num_devices == 1
    dollars = search(MODEL, CLUSTER, WORK, objective="dollars", price_per_hour=2.0)
    fastest = search(MODEL, CLUSTER, WORK)
    assert dollars.best is not None
    assert fastest.best is not None
    each = dollars.best.cost.tokens_per_second_per_device
    assert each >= fastest.best.cost.tokens_per_second_per_device * (1 - 1e-9)
    with pytest.raises(InvalidInput, match="--price"):
        search(MODEL, CLUSTER, WORK, objective="dollars")
    with pytest.raises(InvalidInput, match="--objective"):
        search(MODEL, CLUSTER, WORK, objective="fun")


@pytest.mark.parametrize("name", ["google-t5/t5-small", "openai/whisper-small", "google/vit-base-patch16-224"])
def test_models_that_are_no_decoders(name: str) -> None:
    model = Model.from_hf(name)
    work = Workload(global_batch_size=16, seq_len=min(256, model.max_seq_len or 256))
    best = plan(model, Cluster.parse("8xh100-sxm"), work).best
    assert best is not None
    assert explain(plan(model, Cluster.parse("8xh100-sxm"), work)).smallest_devices == 1


def test_a_batch_that_no_layout_reaches() -> None:
    with pytest.raises(InvalidInput, match="global_batch_size"):
        plan(MODEL, Cluster.parse("7xh100-sxm"), Workload(global_batch_size=3, seq_len=128))


def test_a_plan_is_written_and_read(tmp_path: Path) -> None:
    from loadmaster.cli.main import main

    out = tmp_path / "plan.toml"
    with pytest.raises(SystemExit) as end:
        main(["plan", "gpt2", "--on", "8xh100-sxm", "--batch", "8", "--seq", "128", "-o", str(out)])
    assert end.value.code == 0
    read = PlanFile.load(out)
    assert read.model().num_params == 124439808
    cost = price(read.model(), read.cluster, read.workload, read.layout, stack=read.stack)
    assert cost.memory.terms == read.predicted["memory"].terms
