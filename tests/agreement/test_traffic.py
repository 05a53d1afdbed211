"""Bytes sent per rank and messages equal the law, for every ZeRO stage, shape, accumulation and algorithm."""

import pytest


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_is_sent_is_what_the_law_says(run_ranks, num_ranks):
    for rows in run_ranks("traffic.py", num_ranks):
        assert len(rows) == {2: 23, 4: 9}[num_ranks]
        for row in rows:
            for kind in ("bytes", "messages"):
                law, sent = row[kind]
                assert sent == law, (row["layout"], row["algorithm"], kind)
