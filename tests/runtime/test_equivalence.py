"""Every layout of the data axes gives one process's loss, gradient norm, gradients, weights and state, and sends as
many bytes and messages as the law says."""

import pytest


@pytest.mark.ranks
@pytest.mark.parametrize(("num_ranks", "steps", "count"), [(2, 20, 20), (4, 3, 14)])
def test_every_layout_computes_what_one_process_does(run_ranks, num_ranks, steps, count):
    every = run_ranks("equivalence.py", num_ranks, str(steps), timeout=280)
    assert len(every[0]) == count
    for row in every[0]:
        for measure in ("loss", "norm", "gradient", "weight", "exp_avg"):
            assert row[measure] < 1e-6, row
        one_batch_a_rank = row["per_batch"] > 1 and row["algorithm"] == "direct"
        if one_batch_a_rank and "dp_replicate=2,dp_shard" not in row["layout"]:
            assert row["gradient"] == row["weight"] == row["exp_avg"] == 0, row  # same order of sums, same bits
    for rows in every:
        for row in rows:
            for kind in ("bytes", "messages"):
                law, sent = row[kind]
                assert sent == law, (row["layout"], row["algorithm"], kind)
