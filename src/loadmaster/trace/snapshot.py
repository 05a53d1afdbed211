"""A timeline in PyTorch's memory-snapshot format: a pickle that pytorch.org/memory_viz and torch.cuda._memory_viz read.

Addresses, segments and block sizes are those of the allocator's model; a frame names module and op in place of a file.
Checked with the reader that PyTorch ships (`torch.cuda._memory_viz`: `trace`, `segsum`, `trace_plot`); the page itself
loads its script from the network and was not opened.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from loadmaster.trace.allocator import Block, CachingAllocator, Rules
from loadmaster.trace.timeline import Storage, Timeline

__all__ = ["snapshot", "write_snapshot"]


def write_snapshot(timeline: Timeline, path: str) -> None:
    """Pickle the snapshot to `path`."""
    Path(path).write_bytes(pickle.dumps(snapshot(timeline)))


def snapshot(timeline: Timeline, rules: Rules | None = None) -> dict[str, Any]:
    """``{"device_traces": [[events]], "segments": [...]}`` of the traced steps."""
    allocator = CachingAllocator(rules)
    blocks: dict[int, Block] = {}
    sizes: dict[int, int] = {}
    segments: list[tuple[int, int]] = []  # address, size
    entries: list[dict[str, Any]] = []
    columns = (timeline.delta_event, timeline.delta_storage, timeline.delta_bytes)
    for event, index, change in zip(*(column.tolist() for column in columns), strict=True):
        storage = timeline.storages[index]
        sizes[index] = sizes.get(index, 0) + change
        if index in blocks:
            block = blocks.pop(index)
            for action in ("free_requested", "free_completed"):
                entries.append(_entry(action, block.address, block.requested, event, timeline, storage))
            allocator.free(block)
        if sizes[index]:
            reserved = allocator.reserved
            block = blocks[index] = allocator.malloc(sizes[index])
            if allocator.reserved > reserved:
                segments.append((block.address, allocator.reserved - reserved))
                entries.append(_entry("segment_alloc", *segments[-1], event, timeline, storage))
            entries.append(_entry("alloc", block.address, sizes[index], event, timeline, storage))
    held = {block.address: (block, timeline.storages[i]) for i, block in blocks.items()}
    return {"device_traces": [entries], "segments": [_segment(a, s, held, timeline) for a, s in segments]}


def _frames(storage: Storage, timeline: Timeline) -> list[dict[str, Any]]:
    born = timeline.events[storage.birth]
    return [
        {"filename": born.op, "line": storage.birth, "name": storage.name or storage.category.value},
        {"filename": born.module or "root", "line": storage.birth, "name": born.phase},
    ]


def _entry(action: str, address: int, size: int, event: int, timeline: Timeline, storage: Storage) -> dict[str, Any]:
    return {
        "action": action, "addr": address, "size": size, "stream": 0, "time_us": event,
        "frames": _frames(storage, timeline), "category": storage.category.value,
    }  # fmt: skip


def _gap(address: int, size: int) -> dict[str, Any]:
    return {"size": size, "requested_size": 0, "state": "inactive", "address": address, "frames": []}


def _segment(address: int, size: int, held: dict[int, tuple[Block, Storage]], timeline: Timeline) -> dict[str, Any]:
    """A segment at the end of the trace: blocks in use, and what lies between them."""
    inside = sorted(a for a in held if address <= a < address + size)
    blocks: list[dict[str, Any]] = []
    place = address
    for start in inside:
        block, storage = held[start]
        if start > place:
            blocks.append(_gap(place, start - place))
        blocks.append({
            "size": block.size, "requested_size": block.requested, "state": "active_allocated", "address": start,
            "frames": _frames(storage, timeline),
        })  # fmt: skip
        place = start + block.size
    if place < address + size:
        blocks.append(_gap(place, address + size - place))
    used = sum(b["size"] for b in blocks if b["state"] == "active_allocated")
    return {
        "device": 0, "address": address, "total_size": size, "allocated_size": used, "active_size": used,
        "requested_size": sum(b["requested_size"] for b in blocks), "stream": 0, "segment_pool_id": (0, 0),
        "segment_type": "small" if size == 2 << 20 else "large", "is_expandable": False, "frames": [],
        "blocks": blocks,
    }  # fmt: skip
