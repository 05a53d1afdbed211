"""Every layout of the data axes gives one process's loss, gradient norm, gradients, weights and state."""

import pytest


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_layout_computes_what_one_process_does(run_ranks, num_ranks):
    rows = run_ranks("equivalence.py", num_ranks, "20" if num_ranks == 2 else "5")[0]
    assert len(rows) == {2: 20, 4: 36}[num_ranks]
    for row in rows:
        assert row["loss"] < 1e-6, row
        assert row["norm"] < 1e-6, row
        assert row["gradient"] < 2e-6, row
        assert row["weight"] < 2e-6, row
