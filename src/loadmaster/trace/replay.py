"""A timeline replayed through the caching allocator: reserved bytes, fragmentation, and whether a step would fail."""

from __future__ import annotations

from dataclasses import dataclass

from loadmaster.trace.allocator import Block, CachingAllocator, OutOfMemory, Rules
from loadmaster.trace.timeline import Event, Timeline

__all__ = ["Failure", "Replay", "replay"]

_HOST = ("optimizer/step",)  # PyTorch keeps these counters on the CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first request that the allocator cannot serve.

    Attributes:
        event: during which op; requested: bytes; reserved, allocated: at that moment.
        fits_unfragmented: the live bytes and the request together are within the capacity: fragmentation is to blame.
    """

    event: Event
    requested: int
    reserved: int
    allocated: int
    fits_unfragmented: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What the allocator made of a timeline.

    Attributes:
        live_peak: most bytes of live tensors; allocated_peak: of blocks in use, rounded; reserved_peak: of segments.
        fragmentation: share of the reserved bytes that was not allocated when most was reserved.
        retries: how often everything cached had to be given back; num_segments: how many were made.
        failure: None where every request was served.
    """

    live_peak: int
    allocated_peak: int
    reserved_peak: int
    fragmentation: float
    retries: int
    num_segments: int
    failure: Failure | None = None

    def to_json(self) -> dict[str, object]:
        """For programs."""
        failure = None
        if self.failure is not None:
            failure = {
                "event": str(self.failure.event), "requested": self.failure.requested,
                "reserved": self.failure.reserved, "allocated": self.failure.allocated,
                "fits_unfragmented": self.failure.fits_unfragmented,
            }  # fmt: skip
        return {
            "live_peak": self.live_peak, "allocated_peak": self.allocated_peak, "reserved_peak": self.reserved_peak,
            "fragmentation": self.fragmentation, "retries": self.retries, "num_segments": self.num_segments,
            "failure": failure,
        }  # fmt: skip


def replay(timeline: Timeline, rules: Rules | None = None, *, capacity: int | None = None) -> Replay:
    """Replay every birth, resize and death in order; stops at the first request that fails.

    Args:
        timeline: what happened; rules: how the allocator is configured.
        capacity: bytes that segments may take, None: no limit (then nothing fails).
    """
    allocator = CachingAllocator(rules, capacity=capacity)
    blocks: dict[int, Block] = {}
    sizes: dict[int, int] = {}
    live = live_peak = allocated_peak = reserved_peak = allocated_then = 0
    failure: Failure | None = None
    host = {s.index for s in timeline.storages if s.term in _HOST}
    columns = (timeline.delta_event, timeline.delta_storage, timeline.delta_bytes)
    for event, storage, change in zip(*(column.tolist() for column in columns), strict=True):
        if storage in host:
            continue
        size = sizes[storage] = sizes.get(storage, 0) + change
        if storage in blocks:
            allocator.free(blocks.pop(storage))
        live += change
        if size:
            try:
                blocks[storage] = allocator.malloc(size)
            except OutOfMemory as full:
                assert capacity is not None
                failure = Failure(
                    event=timeline.events[event], requested=size, reserved=full.reserved, allocated=full.allocated,
                    fits_unfragmented=live <= capacity,
                )  # fmt: skip
                break
        live_peak, allocated_peak = max(live_peak, live), max(allocated_peak, allocator.allocated)
        if allocator.reserved > reserved_peak:
            reserved_peak, allocated_then = allocator.reserved, 0
        if allocator.reserved == reserved_peak:
            allocated_then = max(allocated_then, allocator.allocated)
    return Replay(
        live_peak=live_peak, allocated_peak=allocated_peak, reserved_peak=reserved_peak,
        fragmentation=1 - allocated_then / reserved_peak if reserved_peak else 0.0, retries=allocator.retries,
        num_segments=allocator.num_segments, failure=failure,
    )  # fmt: skip
