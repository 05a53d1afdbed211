"""One rank's failure is everyone's, at once and by name."""

import pytest


@pytest.mark.ranks
def test_a_rank_that_raises_hangs_or_dies_is_named_on_all(run_ranks):
    (code, first), (killed, _), *_ = run_ranks("failures.py", 2, codes=True)
    assert code == 0
    assert killed == -9
    *raised, hung, died = first
    for failure in raised:
        assert (failure["rank"], failure["step"], failure["micro_batch"]) == (1, 1, 1)
        assert failure["action"] == "forward"
        assert (
            "rank 1 failed at step 1, stage 0, forward of micro-batch 1: ValueError: a broken sample" in failure["text"]
        )
    assert (hung["rank"], died["rank"]) == (1, 1)
    assert (hung["step"], hung["micro_batch"]) == (1, 1)
    assert "does not come on; rank 0 waited 1 s for dp_shard/" in hung["text"]
    assert "silent: killed or frozen; rank 0 lost its connection" in died["text"]
