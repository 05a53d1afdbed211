"""Bytes of 8-bit state against published counts, and what each way of coding loses of a real second moment."""

import numpy as np
import pytest

from loadmaster.describe.model import Model
from loadmaster.laws.quantisation import (
    StateElements,
    coding_error,
    predict_saving,
    share_lost,
    state_bytes,
    state_elements,
    state_terms,
)
from loadmaster.program.codebook import FIRST_MOMENT, LINEAR, SECOND_MOMENT

SMOL = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip


def test_resnet_50_saves_a_seventh_of_a_gib_and_is_not_worth_it() -> None:
    """A user's convolutional net at 9.6 GB: 6 bytes a parameter are 1.5 % of it."""
    saving = predict_saving(25_557_032, peak_bytes=int(9.6e9), optimizer="adam")
    assert saving.bytes_saved == 153_342_192
    assert saving.bytes_saved / 2**30 == pytest.approx(0.143, rel=0.05)
    assert saving.share_of_peak == pytest.approx(0.015, abs=0.002)
    assert not saving.worth_it
    assert "not worth it here" in str(saving)


def test_a_large_saving_is_advised() -> None:
    saving = predict_saving(1_300_000_000, peak_bytes=22 * 2**30)
    assert saving.worth_it


@pytest.mark.parametrize(("embedding_coded", "expected"), [(True, 273_443_328), (False, 442_427_904)])
def test_state_of_smollm_135m_to_the_byte(embedding_coded: bool, expected: int) -> None:
    elements = state_elements(Model.from_hf(SMOL), embedding_coded=embedding_coded)
    assert state_bytes(elements, moments=2).total == expected
    assert state_bytes(elements, moments=2, bits=32).total == 1_076_120_064


def test_elements_below_the_threshold_of_smollm_135m() -> None:
    assert state_elements(Model.from_hf(SMOL), embedding_coded=True).exempt == 35_136


def test_broadcasts_over_bits() -> None:
    elements = StateElements(coded=4096, blocks=16, exempt=100)
    both = state_bytes(elements, moments=2, bits=np.array([32, 8])).total
    assert both.tolist() == [state_bytes(elements, moments=2, bits=b).total for b in (32, 8)]


def test_ranks_add_up_to_the_whole_whatever_their_number() -> None:
    whole = state_terms([(66 * 256, False, 0, 66 * 256)])
    for cut in (256, 8448, 16640):
        parts = [state_terms([(66 * 256, False, a, b)]) for a, b in ((0, cut), (cut, 66 * 256))]
        assert {k: sum(p[k] for p in parts) for k in whole} == whole


def second_moment(n: int = 1 << 16) -> np.ndarray:
    """Squared gradients over six decades, as between the rows and columns of a trained matrix."""
    rng = np.random.default_rng(0)
    return (10 ** rng.uniform(-3, 0, n) * rng.standard_normal(n)).astype(np.float32) ** 2


def test_linear_codes_send_second_moments_to_zero_and_ours_none() -> None:
    v = second_moment()
    per_tensor, per_block = share_lost(v), share_lost(v, block=256)
    assert per_tensor > per_block > 0.5
    assert coding_error(v, SECOND_MOMENT).lost == 0.0


def test_error_of_ours_against_linear() -> None:
    """Most of v lies within 12 octaves of its block's largest, where the code is at most 5.9 % off."""
    v, m = second_moment(), np.random.default_rng(1).standard_normal(1 << 16)
    assert coding_error(v, SECOND_MOMENT).median_relative < SECOND_MOMENT.worst_relative_error()[31]
    assert coding_error(m, FIRST_MOMENT).mean_relative < coding_error(m, LINEAR).mean_relative / 2
