"""Schedule tables against the closed forms of their papers, and their own invariants."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.errors import InvalidInput
from loadmaster.program.schedule import build_schedule


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_replay_gives_the_published_bubbles(pp: int, times: int) -> None:
    m = pp * times
    # idle time of a rank with F = 1, B = 1, W = 1
    idle = {"gpipe": 3 * (pp - 1), "1f1b": 3 * (pp - 1), "zb_h1": pp - 1}
    for name, want in idle.items():
        replay = build_schedule(name, pp=pp, num_micro_batches=m).replay(1.0, 2.0)
        assert replay.seconds - 3 * m == pytest.approx(want), name
    for v in (2, 3):
        # a chunk's forward and backward are 1/v of the stage's: the bubble in chunk units does not grow with v
        table = build_schedule("interleaved_1f1b", pp=pp, num_micro_batches=m, virtual_stages=v)
        assert table.replay(1.0, 2.0).seconds - 3 * m * v == pytest.approx(3 * (pp - 1))


@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (4, 16), (8, 16), (8, 32)])
def test_the_folded_schedules_lose_next_to_nothing(pp: int, m: int) -> None:
    # only the lag of the first forward's way down the ranks remains (half-size chunks)
    for name, slack in (("dualpipe_v", 0), ("zb_v", pp // 2 if pp > 4 else 0)):
        replay = build_schedule(name, pp=pp, num_micro_batches=m).replay(1.0, 2.0)
        assert pp - 1 <= replay.seconds - 6 * m <= pp - 1 + slack, name


def test_peak_in_flight() -> None:
    peaks = {name: build_schedule(name, pp=4, num_micro_batches=8).replay().peak for name in ("gpipe", "1f1b", "zb_h1")}
    assert peaks == {"gpipe": (8, 8, 8, 8), "1f1b": (4, 3, 2, 1), "zb_h1": (4, 4, 4, 4)}
    # in half-size chunks: ZB-V holds what 1F1B's first rank holds, DualPipe-V one chunk more
    assert build_schedule("zb_v", pp=4, num_micro_batches=8).replay().peak == (8, 8, 8, 8)
    assert build_schedule("dualpipe_v", pp=4, num_micro_batches=8).replay().peak == (9, 9, 9, 9)
    # interleaving holds more chunks of 1/v: (2 (p - 1) + (v - 1) p + 1) / v stages, never fewer than 1F1B
    interleaved = build_schedule("interleaved_1f1b", pp=4, num_micro_batches=8, virtual_stages=2).replay().peak
    assert interleaved == (11, 9, 7, 5)


def test_fewer_micro_batches_than_stages_runs_with_a_large_bubble() -> None:
    # torchtitan issue 775: four stages, two micro-batches hung
    table = build_schedule("1f1b", pp=4, num_micro_batches=2)
    assert table.warmup_forwards() == (2, 2, 2, 1)
    assert table.replay(1.0, 2.0).bubble_fraction == pytest.approx(0.6)


@given(st.sampled_from(["gpipe", "1f1b", "zb_h1", "zb_v"]), st.integers(1, 6), st.integers(1, 9))
def test_tables_check_themselves(name: str, pp: int, m: int) -> None:
    table = build_schedule(name, pp=pp, num_micro_batches=m)
    replay = table.replay(1.0, 2.0, send=0.25)
    assert replay.seconds >= max(replay.busy)


def test_refusals_name_what_would_run() -> None:
    with pytest.raises(InvalidInput, match="use 8 or 12 micro-batches"):
        build_schedule("interleaved_1f1b", pp=4, num_micro_batches=10, virtual_stages=2)
    with pytest.raises(InvalidInput, match="at least 2 pp = 8"):
        build_schedule("dualpipe_v", pp=4, num_micro_batches=4)
    with pytest.raises(InvalidInput, match="one chunk a rank"):
        build_schedule("1f1b", pp=4, num_micro_batches=4, virtual_stages=2)


def test_unequal_stages_slow_the_whole_pipeline() -> None:
    table = build_schedule("1f1b", pp=4, num_micro_batches=16)
    even = table.replay(1.0, 2.0).seconds
    slow_last = table.replay(lambda s: 1.5 if s == 3 else 1.0, lambda s: 3.0 if s == 3 else 2.0).seconds
    assert slow_last == pytest.approx(even + 16 * 1.5)
