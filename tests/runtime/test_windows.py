"""Windows, odd parameters, precisions, optimizers and moving state, on two ranks, at every ZeRO stage."""

import math

import pytest

EXACT = 1e-6  # relative, fp32


@pytest.fixture(scope="module")
def found(run_ranks):
    first, second = run_ranks("features.py", 2, timeout=280)
    assert first == second  # everything is agreed
    return first


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    ["uneven", "weighted", "late_count", "one_rank_counts", "odd", "frozen", "momentum", "factory", "groups"],
)
def test_equals_one_process_at_every_stage(found, case):
    loss, gradient, weight = found[case]
    assert loss < EXACT
    assert gradient < EXACT
    assert weight < EXACT


def test_a_window_without_a_counted_token_is_no_step_and_says_so(found):
    for skipped, loss, reason, moved in found["nothing_counts"]:
        assert skipped
        assert loss == 0.0
        assert "no token" in reason
        assert moved == 0.0


def test_one_ranks_inf_skips_the_step_on_all_and_is_named(found):
    for skipped, reason, moved, next_skipped in found["inf"]:
        assert skipped
        assert reason == "the loss of rank 1 is inf or nan"
        assert moved == 0.0
        assert not next_skipped


def test_a_high_loss_scale_comes_down_by_agreed_skips(found):
    skipped, scales, losses = found["fp16"]
    skips = skipped.index(False)
    assert skipped == [True] * skips + [False] * (24 - skips)
    assert scales == [2.0 ** (30 - min(i, skips)) for i in range(24)]
    assert losses[:skips] == [losses[0]] * skips  # the weights did not move
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-master", "bf16"])
def test_every_precision_is_the_same_bits_at_every_stage(found, precision):
    row = found["precision"][precision]
    assert row["differences"] == [0.0, 0.0, 0.0]
    assert ("master" in row["kinds"]) == (precision == "bf16-master")
    assert row["losses"][-1] < row["losses"][0]


def test_an_average_of_weights_and_state_on_the_host(found):
    assert max(found["average"]) < EXACT


def test_state_moves_between_layouts_without_its_padding(found):
    assert len(found["resume"]) == 3 * 5
    for *differences, counts in found["resume"]:
        assert max(differences) < EXACT
        assert {counts["vector/exp_avg"], counts["vector/param"]} == {1001}
        assert {counts["matrix/exp_avg_sq"], counts["matrix/param"]} == {91}


def test_the_norm_counts_every_element_once(found):
    """Two replicas of a gradient of norm 0.8 read 0.8, not 1.131371, and are not clipped at 1."""
    assert all(math.isclose(norm, 0.8, rel_tol=1e-6) for norm in found["norm"])


def test_a_frozen_majority_in_units_of_the_weights(found):
    """10 % trainable: 1 + 0.1 + 0.2 on one rank; what is left whole dominates (weights whole: 1 + 0.3 / n)."""
    whole, first, second, third = found["frozen_bytes"]
    kinds = ("parameters", "gradients", "optimizer/exp_avg", "optimizer/exp_avg_sq")

    def total(row):
        return sum(row[k] for k in kinds)

    assert total(whole) == pytest.approx(1.3, rel=1e-3)
    assert total(first) == pytest.approx(1 + 0.1 + 0.1, rel=1e-3)
    assert total(second) == pytest.approx(1 + 0.3 / 2, rel=1e-3)
    assert total(third) == pytest.approx(1.3 / 2, rel=1e-3)


def test_gradients_exist_once(found):
    """Buckets are no second copy: nothing beside `gradients` where they last."""
    for row in found["frozen_bytes"][:2]:
        assert row["gradients"] == pytest.approx(0.1, rel=1e-3)
        assert "buffers/buckets" not in row
