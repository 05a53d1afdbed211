"""Micro-batches in flight: the closed forms against a replay of the schedules' tables."""

import pytest

from loadmaster.laws.in_flight import chunks_in_flight, per_chunk
from loadmaster.program.schedule import build_schedule

SHAPES = [
    *(("gpipe", p, 1, m) for p, m in ((2, 4), (4, 6))),
    *(("1f1b", p, 1, m) for p, m in ((2, 2), (4, 8), (4, 2), (8, 16))),
    *(("interleaved_1f1b", p, v, m) for p, v, m in ((2, 2, 4), (4, 2, 8), (4, 3, 12), (4, 2, 4))),
    *(("zb_h1", p, 1, m) for p, m in ((2, 4), (4, 8), (4, 12))),
    *(("zb_v", p, 2, m) for p, m in ((2, 8), (4, 12))),
    *(("dualpipe_v", p, 2, m) for p, m in ((2, 8), (4, 12))),
]


@pytest.mark.parametrize(("schedule", "pp", "virtual", "count"), SHAPES)
def test_closed_form_equals_replay(schedule, pp, virtual, count):
    peaks = build_schedule(schedule, pp=pp, num_micro_batches=count, virtual_stages=virtual).replay().peak
    law = [chunks_in_flight(schedule, pp=pp, stage=i, virtual_stages=virtual, micro_batches=count) for i in range(pp)]
    assert list(peaks) == law


@pytest.mark.parametrize("count", [4, 8])
def test_chunks_share_what_is_in_flight(count):
    for stage in range(4):
        chunks = chunks_in_flight("interleaved_1f1b", pp=4, stage=stage, virtual_stages=3, micro_batches=count)
        shares = per_chunk("interleaved_1f1b", chunks, pp=4, virtual_stages=3, most=3)
        assert sum(shares) == chunks
        assert max(shares) <= count
