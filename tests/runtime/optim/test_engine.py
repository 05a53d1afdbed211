"""The engine with optimizer_bits=8: bit for bit the same on any ZeRO stage, and resumed into any other."""

import pytest

from loadmaster.errors import InvalidInput


@pytest.mark.ranks
def test_8_bit_training_does_not_depend_on_the_layout(run_ranks) -> None:
    (result, *_) = run_ranks("eight_bit.py", 2)
    for name, found in result["found"].items():
        if name.startswith("terms"):
            assert {"optimizer/exp_avg", "optimizer/exp_avg_sq", "optimizer/scales"} <= set(found)
        else:
            assert found == [], name
    assert result["coded"]
    assert not any("wte" in name or "embed" in name for name in result["coded"])


def test_an_optimizer_without_8_bit_state_is_refused() -> None:
    from loadmaster.runtime.optimizer import OptimizerConfig, build_optimizer

    with pytest.raises(InvalidInput, match="has no 8-bit state"):
        build_optimizer(OptimizerConfig(name="sgd", state_bits=8), [], {})


@pytest.mark.ranks
def test_dtensors_cut_along_rows_give_the_same_bits(run_ranks, tmp_path) -> None:
    for result in run_ranks("eight_bit_dtensor.py", 2, str(tmp_path)):
        assert all(result["equal"].values()), result["equal"]
        cut, columns = result["refused"]
        assert "cuts a block of 256 elements" in cut
        assert "do not cut along dimension 0 alone" in columns
