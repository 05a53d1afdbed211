"""State and buffers of the fullest rank equal the law to the byte, for every ZeRO stage, shape and precision."""

import pytest


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_what_is_held_is_what_the_law_says(run_ranks, num_ranks):
    ranks = run_ranks("held.py", num_ranks)
    for rows in zip(*ranks, strict=True):
        law = rows[0]["law"]
        fullest = max((row["held"] for row in rows), key=lambda held: held["optimizer/exp_avg"])
        borrowed, most = fullest.pop("buffers/buckets", 0), law.pop("buffers/buckets", 0)
        assert fullest == law, rows[0]["layout"]
        # the pool lends a buffer of up to twice what is needed; a quick link hands them back sooner
        assert borrowed <= 2 * most, rows[0]["layout"]
