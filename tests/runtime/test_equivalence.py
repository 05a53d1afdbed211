"""Every layout of the data axes gives one process's loss, gradient norm, gradients, weights and state."""

import pytest


@pytest.mark.ranks
@pytest.mark.parametrize(("num_ranks", "steps", "count"), [(2, 20, 20), (4, 4, 18)])
def test_every_layout_computes_what_one_process_does(run_ranks, num_ranks, steps, count):
    rows = run_ranks("equivalence.py", num_ranks, str(steps))[0]
    assert len(rows) == count
    for row in rows:
        for measure in ("loss", "norm", "gradient", "weight", "exp_avg"):
            assert row[measure] < 1e-6, row
        one_batch_a_rank = row["per_batch"] > 1 and row["algorithm"] == "direct"
        if one_batch_a_rank and "dp_replicate=2,dp_shard" not in row["layout"]:
            assert row["gradient"] == row["weight"] == row["exp_avg"] == 0, row  # same order of sums, same bits
