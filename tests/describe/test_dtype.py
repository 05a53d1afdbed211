"""Formats: published constants, and torch as the oracle of rounding."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadmaster.describe.dtype import DTYPES, DType
from loadmaster.errors import InvalidInput


@pytest.mark.parametrize(
    ("name", "largest", "normal", "subnormal"),
    [
        ("fp32", 3.4028234663852886e38, 1.1754943508222875e-38, 1.401298464324817e-45),
        ("bf16", 3.3895313892515355e38, 1.1754943508222875e-38, 9.183549615799121e-41),
        ("fp16", 65504.0, 6.103515625e-05, 5.960464477539063e-08),
        ("fp8_e4m3", 448.0, 2.0**-6, 2.0**-9),
        ("fp8_e5m2", 57344.0, 2.0**-14, 2.0**-16),
    ],
)
def test_published_ranges(name: str, largest: float, normal: float, subnormal: float) -> None:
    dtype = DType.named(name)
    assert (dtype.max, dtype.smallest_normal, dtype.smallest_subnormal) == (largest, normal, subnormal)


def test_case_2_1_just_above_the_fp16_range() -> None:
    fp16, bf16 = DTYPES["fp16"], DTYPES["bf16"]
    assert fp16.round(66246.39) == math.inf
    assert fp16.overflows(66246.39)
    assert bf16.round(66246.39) == 66048.0
    assert not bf16.overflows(66246.39)


@pytest.mark.parametrize(
    ("count", "bf16", "fp16", "infinite"),
    [(4096, 769, 3073, 0), (8192, 897, 4097, 0), (32768, 1153, 6145, 0), (131072, 1409, 7168, 65552)],
)
def test_case_2_6_positions_that_collide(count: int, bf16: int, fp16: int, infinite: int) -> None:
    half = DTYPES["fp16"]
    assert DTYPES["bf16"].num_distinct(count) == bf16
    assert half.num_distinct(count) == fp16
    assert sum(half.overflows(float(i)) for i in range(65000, max(count, 65000))) == infinite
    assert DTYPES["bf16"].round(15962.0) == 15936.0


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_e5m2"])
def test_num_distinct_agrees_with_counting(name: str) -> None:
    dtype = DTYPES[name]
    for count in (1, 2, 7, 300, 1023, 5000):
        assert dtype.num_distinct(count) == len({dtype.round(float(i)) for i in range(count)})


TORCH = {
    "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip


@settings(deadline=None)  # the first example imports torch
@given(st.floats(width=32, allow_nan=False), st.sampled_from(sorted(TORCH)))
def test_rounding_is_torch_s(x: float, name: str) -> None:
    torch = pytest.importorskip("torch")
    ours = DTYPES[name].round(x)
    theirs = torch.tensor(x, dtype=torch.float32).to(getattr(torch, TORCH[name])).double().item()
    assert (math.isnan(ours) and math.isnan(theirs)) or ours == theirs


def test_bad_formats_are_refused() -> None:
    with pytest.raises(InvalidInput, match="dtype = fp12: is no known format; use one of"):
        DType.named("fp12")
    with pytest.raises(InvalidInput, match="needs a sign"):
        DType(name="odd", bits=4, exponent_bits=4, mantissa_bits=3)
