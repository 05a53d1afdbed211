"""Bus bandwidth conventions, two nodes against one, and the bucket that pays: worked cases from public reports."""

import pytest

from loadmaster.errors import InvalidInput
from loadmaster.laws.collectives import (
    Tier,
    algorithm_bandwidth,
    best_bucket,
    bus_bandwidth,
    bus_factor,
    collective_seconds,
    hierarchical_all_reduce,
    tree_all_reduce,
)
from loadmaster.laws.overlap import replay_buckets

GIB = 1 << 30


@pytest.mark.parametrize(
    ("op", "n", "bus"), [("all_reduce", 8, 469.76), ("all_gather", 8, 234.88), ("all_reduce", 2, 268.44)]
)
def test_bus_bandwidth_is_what_nccl_tests_prints(op: str, n: int, bus: float) -> None:
    # NVIDIA/nccl-tests issues 212 and 274
    assert bus_bandwidth(op, GIB, n, 0.004) / 1e9 == pytest.approx(bus, rel=1e-3)
    assert algorithm_bandwidth(GIB, 0.004) / 1e9 == pytest.approx(268.44, rel=1e-3)


def test_factors() -> None:
    assert bus_factor("broadcast", 8) == bus_factor("send", 8) == 1
    assert bus_factor("reduce_scatter", 4) == bus_factor("all_to_all", 4) == 0.75
    with pytest.raises(InvalidInput, match="use one of all_reduce"):
        bus_factor("scan", 4)


def test_two_nodes_over_slow_ethernet_lose() -> None:
    # NVIDIA/nccl issue 318: fp32 gradients of a RoBERTa-base over 25 Gb/s
    num_bytes = 4 * 124_645_632
    flat = collective_seconds("all_reduce", num_bytes, 16, Tier(alpha=0.0, bandwidth=3.125e9))
    fast = Tier(alpha=0.0, bandwidth=130e9)
    two_level = hierarchical_all_reduce(
        num_bytes, per_node=8, num_nodes=2, intra=fast, inter=Tier(alpha=0.0, bandwidth=3.125e9 / 8)
    )
    one_node = collective_seconds("all_reduce", num_bytes, 8, fast)
    assert flat == pytest.approx(0.299, rel=0.01)
    assert two_level - one_node == pytest.approx(0.16, rel=0.01)
    assert one_node == pytest.approx(0.0067, rel=0.01)
    # eight micro-batches to a step cost the second node an eighth as much a micro-batch
    assert two_level / 8 < 0.03


def test_tree_beats_ring_for_small_messages_on_many_ranks_only() -> None:
    # a ring's start-up grows with n - 1 hops, a tree's with log2 n
    hop = 5e-6
    ring = Tier(alpha=hop * 2 * (256 - 1), bandwidth=50e9)
    tree = Tier(alpha=2 * hop, bandwidth=50e9)
    assert tree_all_reduce(1 << 14, 256, tree) < collective_seconds("all_reduce", 1 << 14, 256, ring)
    assert tree_all_reduce(1 << 34, 256, tree) >= collective_seconds("all_reduce", 1 << 34, 256, ring) * 0.99


def test_bucket_size_follows_latency_and_memory() -> None:
    near, far = Tier(alpha=2e-5, bandwidth=300e9), Tier(alpha=2e-3, bandwidth=10e9)
    small, _ = best_bucket(GIB, 8, near, 0.1)
    large, _ = best_bucket(GIB, 64, far, 0.1)
    assert small < large  # a slower start wants larger buckets
    capped, cost = best_bucket(GIB, 64, far, 0.1, memory_bytes=1 << 20)
    assert capped <= 1 << 20
    assert cost > best_bucket(GIB, 64, far, 0.1)[1]
    assert best_bucket(GIB, 1, near, 0.1) == (GIB, 0.0)


def test_replay_of_buckets() -> None:
    # communication slower than compute: the streams end one after another, start to end
    times = replay_buckets([1.0] * 4, [2.0] * 4)
    assert times.starts == (1.0, 3.0, 5.0, 7.0)
    assert times.exposed == 5.0
    # faster: only the last bucket shows
    assert replay_buckets([1.0] * 4, [0.5] * 4).exposed == 0.5
    # a reduction beside the compute slows it
    assert replay_buckets([1.0, 1.0], [1.0, 1.0], slowdown=0.1).ready[1] == pytest.approx(2.1)
