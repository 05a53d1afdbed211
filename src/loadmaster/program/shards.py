"""The shard table: which flat range of which parameter belongs to which rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from loadmaster.program.buckets import Bucket

__all__ = ["Range", "fullest_rank", "owned_elements", "owned_ranges", "split_range", "whole_ranges"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Elements [start, stop) of the flattened parameter `name`, at `offset` in its owner's chunk."""

    name: str
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start


def owned_ranges(bucket: Bucket, rank: int) -> tuple[Range, ...]:
    """What `rank` of the bucket's shards owns; padding belongs to no range.

    >>> from loadmaster.program.buckets import make_bucket
    >>> from loadmaster.program.params import Parameter
    >>> bucket = make_bucket(0, [Parameter(name="v", shape=(1001,)), Parameter(name="m", shape=(7, 13))], num_shards=4)
    >>> [[(r.name, r.start, r.stop, r.offset) for r in owned_ranges(bucket, k)] for k in range(4)]
    [[('v', 0, 512, 0)], [('v', 512, 1001, 0)], [('m', 0, 91, 0)], []]
    """
    low = rank * bucket.chunk
    high = low + bucket.chunk
    found = []
    for entry in bucket.entries:
        start, stop = max(low - entry.offset, 0), min(high - entry.offset, entry.numel)
        if start < stop:
            found.append(Range(name=entry.name, start=start, stop=stop, offset=entry.offset + start - low))
    return tuple(found)


def whole_ranges(bucket: Bucket) -> tuple[Range, ...]:
    """Every parameter of the bucket whole: what each rank updates at stage 0."""
    return tuple(Range(name=e.name, start=0, stop=e.numel, offset=e.offset) for e in bucket.entries)


def owned_elements(buckets: Iterable[Bucket], rank: int) -> int:
    """Elements that `rank` updates, padding excluded."""
    return sum(r.numel for bucket in buckets for r in owned_ranges(bucket, rank))


def fullest_rank(buckets: Iterable[Bucket], num_ranks: int) -> int:
    """The first rank that updates most elements: the one that owns least padding.

    Only the gaps between parameters are looked at, so it costs no more with many ranks than with few.

    >>> from loadmaster.program.buckets import make_bucket
    >>> from loadmaster.program.params import Parameter
    >>> rows = [Parameter(name="v", shape=(1001,)), Parameter(name="m", shape=(7, 13))]
    >>> fullest_rank([make_bucket(0, rows, num_shards=4)], 4)
    0
    """
    padding = [0] * num_ranks
    whole = [0] * (num_ranks + 1)  # chunks of nothing but padding, as differences
    for bucket in buckets:
        ends = [entry.offset for entry in bucket.entries[1:]] + [bucket.numel]
        for entry, stop in zip(bucket.entries, ends, strict=True):
            start = entry.offset + entry.numel
            if start == stop:
                continue
            first, last = start // bucket.chunk, (stop - 1) // bucket.chunk
            if first == last:
                padding[first] += stop - start
                continue
            padding[first] += (first + 1) * bucket.chunk - start
            padding[last] += stop - last * bucket.chunk
            whole[first + 1] += bucket.chunk
            whole[last] -= bucket.chunk
    total = [own + more for own, more in zip(padding, accumulate(whole), strict=False)]
    return min(range(num_ranks), key=total.__getitem__)


def split_range(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """The `index`-th of `parts` nearly equal pieces of [start, stop): replicas share the writing of a checkpoint.

    >>> [split_range(0, 10, 3, i) for i in range(3)]
    [(0, 3), (3, 6), (6, 10)]
    """
    size = stop - start
    return start + size * index // parts, start + size * (index + 1) // parts
