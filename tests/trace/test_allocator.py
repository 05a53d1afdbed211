"""The model of the caching allocator: PyTorch's documented rules, and invariants over random requests."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from loadmaster.errors import InvalidInput
from loadmaster.trace.allocator import CachingAllocator, OutOfMemory, Rules, round_size, segment_size
from loadmaster.trace.api import trace
from loadmaster.trace.replay import replay
from loadmaster.units import KIB, MIB


@pytest.mark.parametrize(
    ("request_", "block", "segment"),
    [
        (1, 512, 2 * MIB), (512, 512, 2 * MIB), (513, 1024, 2 * MIB), (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB), (10 * MIB - 512, 10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 11 * MIB, 12 * MIB), (21 * MIB + 1, 21 * MIB + 512, 22 * MIB),
    ],
)  # fmt: skip
def test_sizes_of_blocks_and_segments(request_, block, segment):
    assert round_size(request_) == block
    assert segment_size(block) == segment
    allocator = CachingAllocator()
    assert allocator.malloc(request_).size in (block, segment)  # a large block keeps a rest of up to 1 MiB
    assert allocator.reserved == segment


def test_power_of_two_divisions():
    rules = Rules(roundup_power2_divisions=4)
    assert [round_size(n * KIB, rules) // KIB for n in (1024, 1025, 1200, 1280, 1281, 1600, 1800)] == [
        1024, 1280, 1280, 1280, 1536, 1792, 2048,
    ]  # fmt: skip


def test_small_blocks_share_a_segment_and_large_rests_are_kept():
    allocator = CachingAllocator()
    for _ in range(4096):
        allocator.malloc(512)
    assert allocator.reserved == 2 * MIB
    allocator.malloc(512)
    assert allocator.reserved == 4 * MIB
    large = CachingAllocator()
    assert large.malloc(19 * MIB + 1).size == 20 * MIB  # a rest of less than 1 MiB is not split off
    assert large.allocated == 20 * MIB


def test_best_fit_takes_the_smallest_block_that_is_large_enough():
    allocator = CachingAllocator()
    blocks = [allocator.malloc(n * MIB) for n in (40, 12, 20, 12)]
    addresses = [b.address for b in blocks]
    for block in blocks:
        allocator.free(block)
    assert allocator.malloc(12 * MIB).address == addresses[1]  # of equal ones the lowest address
    assert allocator.malloc(13 * MIB).address == addresses[2]
    assert allocator.malloc(21 * MIB).address == addresses[0]
    assert allocator.reserved == 84 * MIB


def test_freed_neighbours_merge():
    allocator = CachingAllocator()
    blocks = [allocator.malloc(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    for place in (0, 2, 1, 3):
        allocator.free(blocks[place])
    assert allocator.malloc(20 * MIB).address == blocks[0].address
    assert allocator.reserved == 20 * MIB


def test_a_stream_does_not_use_another_streams_cache():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(12 * MIB, stream=0))
    allocator.malloc(12 * MIB, stream=1)
    assert allocator.reserved == 24 * MIB


def test_cached_segments_are_released_before_a_request_fails():
    allocator = CachingAllocator(capacity=40 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    allocator.malloc(40 * MIB)
    assert (allocator.reserved, allocator.retries) == (40 * MIB, 1)
    with pytest.raises(OutOfMemory):
        allocator.malloc(512)


def test_fragmentation_fails_although_enough_is_free():
    """Two rests of one segment each: 20 MiB are free, but no 20 MiB block is."""
    allocator = CachingAllocator(capacity=40 * MIB)
    held = [allocator.malloc(10 * MIB) for _ in range(2)] + [allocator.malloc(5 * MIB) for _ in range(4)]
    for block in (held[0], held[2], held[4]):
        allocator.free(block)
    assert 40 * MIB - allocator.allocated >= 20 * MIB
    with pytest.raises(OutOfMemory):
        allocator.malloc(20 * MIB)


def test_max_split_size_keeps_large_blocks_whole():
    allocator = CachingAllocator(Rules(max_split_size=30 * MIB))
    allocator.free(allocator.malloc(40 * MIB))
    allocator.malloc(25 * MIB)  # not out of the 40 MiB block
    assert allocator.reserved == 66 * MIB
    allocator.malloc(39 * MIB)  # as large: taken, with its rest
    assert (allocator.reserved, allocator.allocated) == (66 * MIB, 40 * MIB + 26 * MIB)
    with pytest.raises(InvalidInput, match="more than 20 MiB"):
        Rules(max_split_size=20 * MIB)


def test_garbage_collection_gives_back_old_segments():
    allocator = CachingAllocator(Rules(garbage_collection_threshold=0.5), capacity=100 * MIB)
    old = allocator.malloc(40 * MIB)
    allocator.free(old)
    allocator.malloc(20 * MIB)  # out of the cached 40 MiB
    young = allocator.malloc(12 * MIB)
    allocator.free(young)
    allocator.malloc(30 * MIB)
    assert allocator.reserved <= 82 * MIB
    assert allocator.retries == 0


def test_expandable_segments_grow_in_place():
    fixed, expandable = CachingAllocator(), CachingAllocator(Rules(expandable_segments=True))
    for allocator in (fixed, expandable):
        for size in (30, 50, 70):  # each larger than what is cached
            allocator.free(allocator.malloc(size * MIB))
    assert fixed.reserved == 150 * MIB
    assert expandable.reserved == 80 * MIB
    assert expandable.num_segments == 1


def test_settings_are_read_as_pytorch_reads_them():
    rules = Rules.parse("max_split_size_mb:64,expandable_segments:True")
    assert (rules.max_split_size, rules.expandable_segments) == (64 * MIB, True)
    with pytest.raises(InvalidInput, match="is not modelled"):
        Rules.parse("backend:cudaMallocAsync")


requests = st.lists(
    st.tuples(st.integers(1, 60 * MIB), st.integers(0, 1), st.integers(0, 30)), min_size=1, max_size=60
)  # fmt: skip
rules = st.sampled_from(
    [Rules(), Rules(expandable_segments=True), Rules(max_split_size=32 * MIB), Rules(roundup_power2_divisions=8),
     Rules(garbage_collection_threshold=0.6)]
)  # fmt: skip


@given(requests, rules, st.sampled_from([None, 256 * MIB]))
@settings(max_examples=60, deadline=None)
def test_invariants(asked, rule, capacity):
    """Blocks never overlap, bytes are conserved, a block is large enough, the capacity is kept."""
    allocator = CachingAllocator(rule, capacity=capacity)
    held = []
    for size, stream, victim in asked:
        try:
            held.append(allocator.malloc(size, stream=stream))
        except OutOfMemory:
            assert capacity is not None
        if held and victim % 3 == 0:
            allocator.free(held.pop(victim % len(held)))
        spans = sorted((b.address, b.address + b.size) for b in held)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        assert all(b.size >= b.requested and b.size % 512 == 0 for b in held)
        assert allocator.allocated == sum(b.size for b in held) <= allocator.reserved
        assert allocator.requested == sum(b.requested for b in held)
        cached = sum(size for pool in allocator._pools.values() for _, size, _ in pool)
        assert allocator.allocated + cached == allocator.reserved
        assert capacity is None or allocator.reserved <= capacity
    for block in held:
        allocator.free(block)
    assert allocator.allocated == 0
    allocator.release_cached()
    assert allocator.reserved == 0


def test_replay_of_a_step():
    net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    step = trace(net, torch.zeros(256, 512), optimizer="adamw")
    found = replay(step)
    counters = 4 * 8  # AdamW's step counters stay on the host
    assert found.live_peak == step.peak_bytes - counters
    assert found.live_peak <= found.allocated_peak <= found.reserved_peak
    assert found.failure is None
    small = replay(step, capacity=found.reserved_peak - 2 * MIB)
    assert small.failure is not None or small.retries > 0
    tiny = replay(step, capacity=4 * MIB)
    assert tiny.failure is not None
    assert not tiny.failure.fits_unfragmented
