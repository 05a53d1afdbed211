"""Bytes sent per rank and messages equal the law, for every ZeRO stage, shape, accumulation and algorithm."""

import pytest


@pytest.mark.ranks
def test_what_is_sent_is_what_the_law_says(run_ranks):
    """Uneven windows, 16-bit weights, reduction after each micro-batch; four ranks: tests/runtime/test_equivalence."""
    for rows in run_ranks("traffic.py", 2):
        assert len(rows) == 23
        for row in rows:
            for kind in ("bytes", "messages"):
                law, sent = row[kind]
                assert sent == law, (row["layout"], row["algorithm"], kind)
