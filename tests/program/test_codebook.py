"""The 8-bit codes: exact where they must be, within the error they state, and never searched for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.errors import InvalidInput
from loadmaster.program.codebook import (
    FIRST_MOMENT,
    LINEAR,
    SECOND_MOMENT,
    aligned_ranges,
    alignment,
    check_block,
    is_coded,
    num_blocks,
)

CODES = [FIRST_MOMENT, SECOND_MOMENT, LINEAR]


@pytest.mark.parametrize("code", CODES, ids=lambda c: c.name)
def test_every_code_survives_decoding_and_encoding(code) -> None:
    assert code.encode(code.values).tolist() == list(range(code.top + 1))
    assert code.values[0] == 0.0
    assert code.values[-1] == 1.0
    assert (np.diff(code.values.astype(np.float64)) > 0).all()


@pytest.mark.parametrize("code", CODES, ids=lambda c: c.name)
def test_worst_relative_error_by_construction_is_the_measured_one(code) -> None:
    x = np.exp(np.linspace(np.log(code.values[1 << code.taper]), 0, 400_001)).astype(np.float32)
    relative = np.abs(code.decode(code.encode(x)) - x) / x
    gap = np.searchsorted(code.values[1:], x, side="right").clip(1, code.top - 1)
    assert (relative <= code.worst_relative_error()[gap - 1] * (1 + 1e-3) + 1e-6).all()


def test_linear_is_the_code_everyone_knows() -> None:
    x = np.linspace(0, 1, 1001)
    np.testing.assert_array_equal(LINEAR.encode(x), np.rint(x * 127))


@given(st.floats(min_value=2.0**-126, max_value=1.0, width=32))
def test_a_tiny_second_moment_never_becomes_zero(x: float) -> None:
    assert SECOND_MOMENT.encode([x])[0] >= 1


@given(st.lists(st.floats(min_value=0, max_value=1, width=32), min_size=2, max_size=20))
def test_encoding_keeps_order(xs: list[float]) -> None:
    for code in CODES:
        assert (np.diff(code.encode(np.sort(np.array(xs, dtype=np.float32)))) >= 0).all()


def test_ranges_follow_the_block_grid_and_cover_everything() -> None:
    for numel in (1, 91, 1001, 16896, 256, 0):
        for ranks in (1, 2, 3, 4, 7):
            ranges = aligned_ranges(numel, ranks)
            assert len(ranges) == ranks
            assert sum(stop - start for start, stop in ranges) == numel
            assert all(edge % alignment() == 0 or edge == numel for pair in ranges for edge in pair)
            assert sum(num_blocks(stop - start) for start, stop in ranges) == num_blocks(numel)


def test_the_choice_is_made_on_the_whole_parameter() -> None:
    assert is_coded(4096, is_embedding=False)
    assert not is_coded(4095, is_embedding=False)
    assert not is_coded(50257 * 768, is_embedding=True)


@pytest.mark.parametrize("block", [0, 32, 100, 8192])
def test_a_block_off_the_list_is_refused(block: int) -> None:
    with pytest.raises(InvalidInput, match="power of two from 64 to 4096"):
        check_block(block)
