"""Worked cases of half precision, and the closed form of lost updates against counting."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.describe.dtype import DType
from loadmaster.errors import InvalidInput
from loadmaster.laws.precision import clipped_while_scaled, lost_below, lost_share, scale_range, scale_start

BF16, FP16 = DType.named("bf16"), DType.named("fp16")


def test_case_2_2_epsilon_below_the_smallest_number() -> None:
    assert FP16.underflows(1e-8)
    assert not FP16.underflows(1e-4)
    assert not BF16.underflows(1e-8)
    smallest_square_kept = math.sqrt(FP16.smallest_subnormal)
    assert round(smallest_square_kept, 6) == 0.000244


def test_case_2_3_sixteen_skipped_steps() -> None:
    start = scale_start(0.75, init=4294967296, backoff=0.5)
    assert (start.skips, start.settles_at, start.suggested_init) == (16, 65536, 65536)
    assert scale_start(0.75, init=start.suggested_init).skips == 0


def test_case_2_4_clipping_before_unscaling() -> None:
    norm, effective = clipped_while_scaled(0.5, 65536, 1.0)
    assert (norm, effective) == (32768.0, 1.52587890625e-05)


def test_case_2_5_updates_that_bf16_weights_cannot_hold() -> None:
    assert lost_below(1.0, BF16) == 0.001953125
    assert lost_below(0.5, BF16) == 0.0009765625
    lr, decay = 6e-4, 0.01
    bf16, fp32, weight = 1.0, 1.0, 0.5
    for _ in range(100):
        bf16, fp32 = BF16.round(bf16 - BF16.round(lr)), DType.named("fp32").round(fp32 - lr)
    for _ in range(1000):
        weight = BF16.round(weight * (1 - 1e-4 * decay))
    assert (bf16, round(fp32, 5), weight) == (1.0, 0.94, 0.5)
    assert 0.5 * (1 - 1e-4 * decay) ** 1000 == 0.49950024966692286


@given(st.floats(min_value=1e-3, max_value=1e3), st.sampled_from([BF16, FP16]), st.floats(0.01, 0.99))
def test_an_update_below_the_bound_is_lost_and_one_above_is_not(weight: float, dtype: DType, part: float) -> None:
    stored = dtype.round(weight)
    bound = lost_below(stored, dtype)
    assert dtype.round(stored - part * bound) == stored
    assert dtype.round(stored - (1 + part) * bound) != stored


@pytest.mark.parametrize(("update", "std"), [(6e-4, 0.5), (1e-3, 0.3), (1e-4, 0.05), (3e-4, 1.0)])
def test_lost_share_agrees_with_counting(update: float, std: float) -> None:
    numpy = pytest.importorskip("numpy")
    weights = [BF16.round(float(w)) for w in numpy.random.default_rng(0).normal(0, std, 20000)]
    lost = sum(BF16.round(w - update) == w for w in weights) / len(weights)
    assert lost_share(update, std, BF16) == pytest.approx(lost, abs=0.012)


def test_no_scale_serves_a_range_wider_than_the_format() -> None:
    low, high = scale_range(1e-12, 1e4)
    assert low > high
    low, high = scale_range(1e-6, 1.0)
    assert not FP16.underflows(1e-6 * low)
    assert not FP16.overflows(high)


def test_refusals() -> None:
    with pytest.raises(InvalidInput, match=r"max_gradient = nan: must be a finite size"):
        scale_start(math.nan)
    with pytest.raises(InvalidInput, match=r"backoff = 1: must lie between 0 and 1"):
        scale_start(1.0, backoff=1)
