"""Layers on stages: each exactly once, whatever divides what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.errors import InvalidInput
from loadmaster.program.stages import assign_stages, balanced_by_cost, balanced_split


@pytest.mark.parametrize(("layers", "pp"), [(30, 4), (61, 8), (27, 2), (40, 16), (61, 16), (126, 9)])
def test_no_layer_is_lost(layers: int, pp: int) -> None:
    # Megatron-LM issues 1303 and 1304: thirty layers over four stages became twenty-eight
    split = balanced_split(layers, pp)
    assert sum(split) == layers
    assert max(split) - min(split) <= 1


def test_the_reported_splits() -> None:
    assert balanced_split(30, 4) == (8, 8, 7, 7)
    assert max(balanced_split(40, 16)) == 3


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 4), st.sampled_from(["1f1b", "zb_v"]))
def test_every_layer_sits_on_one_stage(layers: int, pp: int, chunks: int, schedule: str) -> None:
    if layers < pp * chunks:
        with pytest.raises(InvalidInput, match="without a layer"):
            assign_stages(layers, pp, virtual_stages=chunks, schedule=schedule)
        return
    stages = assign_stages(layers, pp, virtual_stages=chunks, schedule=schedule)
    assert [i for s in stages for i in range(s.start, s.stop)] == list(range(layers))
    assert [s.embedding for s in stages].count(True) == [s.head for s in stages].count(True) == 1
    assert sorted((s.rank, s.chunk) for s in stages) == [(r, c) for r in range(pp) for c in range(chunks)]


@given(st.lists(st.floats(0.1, 9), min_size=3, max_size=9), st.integers(1, 3), st.floats(0, 20))
def test_split_by_cost_is_the_best_one(costs: list[float], pp: int, head: float) -> None:
    def slowest(split: tuple[int, ...]) -> float:
        stages = assign_stages(len(costs), pp, split=split)
        return max(sum(costs[s.start : s.stop]) + (head if s.head else 0) for s in stages)

    def all_splits(n: int, k: int) -> list[tuple[int, ...]]:
        return [(n,)] if k == 1 else [(i, *rest) for i in range(1, n - k + 2) for rest in all_splits(n - i, k - 1)]

    found = balanced_by_cost(costs, pp, head=head)
    assert slowest(found) <= min(map(slowest, all_splits(len(costs), pp))) + 1e-9


def test_a_split_that_loses_a_layer_is_refused() -> None:
    with pytest.raises(InvalidInput, match="does not place 8 layers once each"):
        assign_stages(8, 2, split=(4, 3))
