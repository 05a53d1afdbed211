"""PyTorch's CUDA caching allocator as a model: what it reserves, splits, merges, gives back, and when it fails.

Follows the documented rules (PyTorch notes, "CUDA semantics: memory management") and the constants of the public source
(c10/cuda/CUDACachingAllocator.cpp): sizes rounded to 512 bytes; requests up to 1 MiB from a pool of 2 MiB segments, up
to 10 MiB from 20 MiB segments, larger ones from segments of their own rounded to 2 MiB; best fit in a stream's pool,
lowest address first; split and merge; before failing, cached segments are released and the request is tried again.

Not modelled: CUDA graphs' private pools, memory pools given by the user, blocks shared between processes, events of
other streams (a block freed is free at once), memory that other libraries take, the driver's own granularity.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loadmaster.errors import InvalidInput
from loadmaster.units import MIB

__all__ = ["Block", "CachingAllocator", "OutOfMemory", "Rules", "round_size", "segment_size"]

MIN_BLOCK = 512
SMALL_SIZE = 1 * MIB  # largest request of the small pool
SMALL_BUFFER = 2 * MIB  # its segments
LARGE_BUFFER = 20 * MIB  # segments of requests up to MIN_LARGE
MIN_LARGE = 10 * MIB
ROUND_LARGE = 2 * MIB


_SETTINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "max_split_size_mb": ("max_split_size", lambda text: int(text) * MIB),
    "roundup_power2_divisions": ("roundup_power2_divisions", int),
    "garbage_collection_threshold": ("garbage_collection_threshold", float),
    "expandable_segments": ("expandable_segments", lambda text: text.strip().lower() == "true"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What PYTORCH_CUDA_ALLOC_CONF sets.

    Attributes:
        max_split_size: blocks of this size or more are not split (None: all are).
        roundup_power2_divisions: sizes are rounded up to a division of the next power of two (0: to 512 bytes).
        garbage_collection_threshold: share of the capacity above which old cached segments are given back (0: never).
        expandable_segments: segments grow in place by pages of 2 MiB (small pool) or 20 MiB.
    """

    max_split_size: int | None = None
    roundup_power2_divisions: int = 0
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False

    def __post_init__(self) -> None:
        if self.max_split_size is not None and self.max_split_size <= LARGE_BUFFER:
            raise InvalidInput("max_split_size", self.max_split_size, "must be more than 20 MiB", "use e.g. 128MiB")
        divisions = self.roundup_power2_divisions
        if divisions and divisions & (divisions - 1):
            raise InvalidInput("roundup_power2_divisions", divisions, "must be a power of two", "use 1, 2, 4 or 8")
        if not 0 <= self.garbage_collection_threshold < 1:
            raise InvalidInput(
                "garbage_collection_threshold", self.garbage_collection_threshold, "must be in [0, 1)", "use e.g. 0.8"
            )

    @classmethod
    def parse(cls, text: str) -> Rules:
        """Read ``max_split_size_mb:128,expandable_segments:True``, as PYTORCH_CUDA_ALLOC_CONF holds it.

        >>> Rules.parse("max_split_size_mb:128,garbage_collection_threshold:0.8").max_split_size == 128 * MIB
        True
        """
        given: dict[str, Any] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = item.partition(":")
            if name not in _SETTINGS:
                raise InvalidInput("alloc_conf", name, "is not modelled", f"use {', '.join(_SETTINGS)}")
            field, read = _SETTINGS[name]
            try:
                given[field] = read(value)
            except ValueError:
                raise InvalidInput("alloc_conf", item, "has no such value", f"write e.g. {name}:1") from None
        return cls(**given)

    @property
    def unsplittable(self) -> float:
        """`max_split_size` as a number."""
        return float("inf") if self.max_split_size is None else self.max_split_size


def round_size(size: int, rules: Rules | None = None) -> int:
    """Bytes of the block that serves a request.

    Power-of-two divisions start at ``512 * divisions`` bytes: of 4 divisions, 1024 1280 1536 1792 KiB.

    >>> round_size(1), round_size(513), round_size(1200 * 1024, Rules(roundup_power2_divisions=4)) // 1024
    (512, 1024, 1280)
    """
    if size < MIN_BLOCK:
        return MIN_BLOCK
    divisions = rules.roundup_power2_divisions if rules else 0
    if divisions > 1 and size > MIN_BLOCK * divisions:
        return _round_power2(size, divisions)
    return -(-size // MIN_BLOCK) * MIN_BLOCK


def _round_power2(size: int, divisions: int) -> int:
    """Up to a multiple of the power of two below `size` over `divisions`."""
    if size <= 4 or size & (size - 1) == 0:
        return size
    floor = 1 << (size.bit_length() - 1)
    step = floor // divisions
    return -(-size // step) * step if step else size


def segment_size(size: int) -> int:
    """Bytes of a new segment for a block of `size`.

    >>> segment_size(512) // MIB, segment_size(5 * MIB) // MIB, segment_size(21 * MIB + 1) // MIB
    (2, 20, 22)
    """
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE:
        return LARGE_BUFFER
    return -(-size // ROUND_LARGE) * ROUND_LARGE


class OutOfMemory(Exception):
    """A request that fails even after everything cached was given back."""

    def __init__(self, size: int, reserved: int, allocated: int) -> None:
        super().__init__(f"{size} bytes: {reserved} reserved, {allocated} allocated")
        self.size, self.reserved, self.allocated = size, reserved, allocated


class Block:
    """A piece of a segment."""

    __slots__ = ("address", "allocated", "born", "next", "previous", "requested", "segment", "size", "small", "stream")

    def __init__(self, address: int, size: int, segment: int, stream: int, small: bool, born: int) -> None:
        self.address, self.size, self.segment, self.stream, self.small = address, size, segment, stream, small
        self.born = born  # what the pool's clock said when it was cached: its age
        self.allocated = False
        self.requested = 0
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def split(self) -> bool:
        """Whether it shares its segment."""
        return self.previous is not None or self.next is not None


Key = tuple[int, int, int]


class CachingAllocator:
    """The allocator of one device.

    >>> allocator = CachingAllocator()
    >>> block = allocator.malloc(3 * MIB)
    >>> allocator.reserved // MIB, allocator.allocated // MIB
    (20, 3)
    >>> allocator.free(block); allocator.reserved // MIB
    20
    """

    def __init__(self, rules: Rules | None = None, *, capacity: int | None = None) -> None:
        self.rules = rules or Rules()
        self.capacity = capacity
        self.reserved = self.allocated = self.requested = 0
        self.retries = self.num_segments = 0
        self._pools: dict[bool, list[Key]] = {True: [], False: []}  # free blocks: (stream, size, address), sorted
        self._blocks: dict[int, Block] = {}  # free blocks by address
        self._next_address = 1 << 40
        self._growing: dict[tuple[int, bool], Block] = {}  # last block of each expandable segment
        self._clock = 0

    # -- requests ----------------------------------------------------------------------------------------------------

    def malloc(self, requested: int, *, stream: int = 0) -> Block:
        """A block of at least `requested` bytes.

        Raises:
            OutOfMemory: nothing is left under the capacity.
        """
        size = round_size(requested, self.rules)
        small = size <= SMALL_SIZE
        self._clock += 1
        block = self._best_fit(size, stream, small) or self._new_block(size, stream, small)
        block = self._trim(block, size)
        block.allocated, block.requested = True, requested
        self.allocated += block.size
        self.requested += requested
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool, merged with free neighbours."""
        assert block.allocated
        block.allocated = False
        self.allocated -= block.size
        self.requested -= block.requested
        for neighbour in (block.previous, block.next):
            if neighbour is not None and not neighbour.allocated:
                self._take(neighbour)
                self._join(block, neighbour)
        self._cache(block)

    def release_cached(self) -> int:
        """Give back every segment (of an expandable one, every page) that nothing uses; bytes released."""
        before = self.reserved
        for block in list(self._blocks.values()):
            if not block.split:
                self._release(block)
        if self.rules.expandable_segments:
            self._shrink()
        return before - self.reserved

    # -- the pools ---------------------------------------------------------------------------------------------------

    def _cache(self, block: Block) -> None:
        block.born = self._clock
        insort(self._pools[block.small], (block.stream, block.size, block.address))
        self._blocks[block.address] = block

    def _take(self, block: Block) -> None:
        pool, key = self._pools[block.small], (block.stream, block.size, block.address)
        del pool[bisect_left(pool, key)]
        del self._blocks[block.address]

    def _best_fit(self, size: int, stream: int, small: bool) -> Block | None:
        """The smallest free block of the stream that is large enough, lowest address first."""
        pool = self._pools[small]
        place = bisect_left(pool, (stream, size, 0))
        if place == len(pool) or pool[place][0] != stream:
            return None
        block = self._blocks[pool[place][2]]
        limit = self.rules.unsplittable
        if size < limit <= block.size:
            return None  # an unsplittable block is not for a smaller request
        if size >= limit and block.size >= size + LARGE_BUFFER:
            return None
        self._take(block)
        return block

    def _new_block(self, size: int, stream: int, small: bool) -> Block:
        """From the device, after giving back what is cached if need be."""
        self._collect_garbage()
        block = self._from_device(size, stream, small)
        limited = self.rules.max_split_size is not None and not self.rules.expandable_segments
        if block is None and limited and self._release_oversize(size, stream):
            block = self._from_device(size, stream, small)
        if block is None:
            self.retries += 1
            self.release_cached()
            block = self._from_device(size, stream, small)
        if block is None:
            raise OutOfMemory(size, self.reserved, self.allocated)
        return block

    def _from_device(self, size: int, stream: int, small: bool) -> Block | None:
        if self.rules.expandable_segments:
            return self._expanded(size, stream, small)
        whole = segment_size(size)
        if not self._room(whole):
            return None
        return self._segment(whole, stream, small)

    def _room(self, size: int) -> bool:
        return self.capacity is None or self.reserved + size <= self.capacity

    def _segment(self, size: int, stream: int, small: bool) -> Block:
        self.reserved += size
        self.num_segments += 1
        block = Block(self._next_address, size, self.num_segments, stream, small, self._clock)
        self._next_address += 1 << 44 if self.rules.expandable_segments else size + ROUND_LARGE
        return block

    def _trim(self, block: Block, size: int) -> Block:
        """Split off what the request does not need, where the rules allow it."""
        rest = block.size - size
        if block.small or self.rules.expandable_segments:
            splits = rest >= MIN_BLOCK
        else:
            splits = size < self.rules.unsplittable and rest > SMALL_SIZE
        if not splits:
            return block
        other = Block(block.address + size, rest, block.segment, block.stream, block.small, self._clock)
        other.previous, other.next = block, block.next
        if block.next is not None:
            block.next.previous = other
        block.next, block.size = other, size
        if self._growing.get((block.stream, block.small)) is block:
            self._growing[block.stream, block.small] = other
        self._cache(other)
        return block

    def _join(self, block: Block, other: Block) -> None:
        """`block` takes over its neighbour's bytes."""
        if block.previous is other:
            block.address, block.previous = other.address, other.previous
            if other.previous is not None:
                other.previous.next = block
        else:
            block.next = other.next
            if other.next is not None:
                other.next.previous = block
        block.size += other.size
        key = (block.stream, block.small)
        if self._growing.get(key) is other:
            self._growing[key] = block

    def _release(self, block: Block) -> None:
        """Give a whole segment back to the device."""
        self._take(block)
        self.reserved -= block.size
        self._growing = {key: last for key, last in self._growing.items() if last is not block}

    # -- giving back -------------------------------------------------------------------------------------------------

    def _collect_garbage(self) -> None:
        """Release the oldest unsplit cached segments while more than the threshold is reserved."""
        threshold = self.rules.garbage_collection_threshold
        if not threshold or self.capacity is None or self.rules.expandable_segments:
            return
        if self.reserved <= threshold * self.capacity:
            return
        target = self.reserved - threshold * self.capacity
        freeable = [b for b in self._blocks.values() if not b.small and not b.split]
        reclaimed = 0
        while freeable and reclaimed < target:
            mean = sum(self._clock - b.born for b in freeable) / len(freeable)
            old = [b for b in freeable if self._clock - b.born >= mean]
            for block in old:
                if reclaimed >= target:
                    return
                reclaimed += block.size
                self._release(block)
                freeable.remove(block)

    def _release_oversize(self, size: int, stream: int) -> bool:
        """Release unsplittable cached segments, one that is large enough or several from the largest down."""
        needed = max(size, self.rules.max_split_size or 0)
        oversize = [b for b in self._blocks.values() if not b.small and not b.split and b.stream == stream]
        enough = [b for b in oversize if b.size >= needed]
        if enough:
            self._release(min(enough, key=lambda b: (b.size, b.address)))
            return True
        released = 0
        for block in sorted(oversize, key=lambda b: -b.size):
            if released >= needed or block.size < (self.rules.max_split_size or 0):
                break
            released += block.size
            self._release(block)
        return released >= needed

    # -- expandable segments -----------------------------------------------------------------------------------------

    def _expanded(self, size: int, stream: int, small: bool) -> Block | None:
        """Grow the stream's segment at its end by whole pages; its last block counts if it is free."""
        page = SMALL_BUFFER if small else LARGE_BUFFER
        last = self._growing.get((stream, small))
        start = 0 if last is None or last.allocated else last.size
        grown = -(-(size - start) // page) * page
        if not self._room(grown):
            return None
        if last is None:
            block = self._segment(grown, stream, small)
        else:
            self.reserved += grown
            if last.allocated:
                block = Block(last.address + last.size, grown, last.segment, stream, small, self._clock)
                block.previous, last.next = last, block
            else:
                self._take(last)
                last.size += grown
                block = last
        self._growing[stream, small] = block
        return block

    def _shrink(self) -> None:
        """Unmap the free pages at the end of each expandable segment."""
        for (stream, small), last in list(self._growing.items()):
            if last.allocated:
                continue
            page = SMALL_BUFFER if small else LARGE_BUFFER
            given = last.size // page * page
            if not given:
                continue
            self._take(last)
            self.reserved -= given
            last.size -= given
            if last.size:
                self._cache(last)
            elif last.previous is not None:
                last.previous.next = None
                self._growing[stream, small] = last.previous
            else:
                del self._growing[stream, small]
