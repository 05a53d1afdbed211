"""A timeline on a terminal: the peak of each phase, what is alive at the peak, and the largest tensors."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.table import Table

from loadmaster.trace.replay import Replay
from loadmaster.trace.timeline import Timeline
from loadmaster.units import format_bytes

__all__ = ["folded", "print_timeline", "timeline_json"]

BAR = 36


def print_timeline(
    timeline: Timeline, console: Console | None = None, *, top: int = 10, replayed: Replay | None = None,
    capacity: int | None = None,
) -> None:  # fmt: skip
    """Print it, with what the caching allocator makes of it."""
    console = console or Console(emoji=False)
    console.print(_render(timeline, top), highlight=False)
    if replayed is not None:
        for line in _allocator(replayed, capacity):
            console.print(line, highlight=False)


def _allocator(replayed: Replay, capacity: int | None) -> list[str]:
    reserved = format_bytes(replayed.reserved_peak)
    lines = [
        f"CUDA caching allocator: {reserved} reserved ({replayed.fragmentation:.1%} of it unused then) for "
        f"{format_bytes(replayed.live_peak)} live, {replayed.num_segments} segments, {replayed.retries} retries"
    ]
    failure = replayed.failure
    if failure is not None and capacity is not None:
        blame = (
            "though the live bytes would fit: fragmentation"
            if failure.fits_unfragmented
            else "the live bytes are too many"
        )
        lines.append(
            f"does not fit {format_bytes(capacity)}: {format_bytes(failure.requested)} refused in {failure.event} with "
            f"{format_bytes(failure.reserved)} reserved and {format_bytes(failure.allocated)} allocated ({blame})"
        )
    elif capacity is not None:
        lines.append(f"fits {format_bytes(capacity)}")
    return lines


def _render(timeline: Timeline, top: int) -> RenderableType:
    peak = timeline.peak
    head = f"{timeline.name}: peak {format_bytes(peak.bytes)} ({peak.bytes} bytes) in {peak.event}"
    notes = [f"note: {note}" for note in timeline.notes]
    last = f"{len(timeline.events)} ops and {len(timeline.storages)} storages in {timeline.seconds:.2f} s"
    return Group(head, *notes, _phases(timeline), _sums("alive at the peak", peak.ledger.terms, peak.bytes),
                 _sums("by the module that made it", folded(peak.by_module), peak.bytes, most=top),
                 _largest(timeline, top), last)  # fmt: skip


def _phases(timeline: Timeline) -> Table:
    table = Table(title="peak of each phase", title_justify="left", box=None, pad_edge=False)
    for name in ("phase", "bytes", "", "in"):
        table.add_column(name, justify="right" if name == "bytes" else "left", overflow="fold")
    largest = timeline.peak.bytes
    for phase, _ in timeline.phases:
        if phase in ("setup", "start"):
            continue
        peak = timeline.peak_in(phase)
        mark = " <- peak" if peak.position == timeline.peak.position else ""
        where = f"{peak.event.module or 'the root module'} ({peak.event.op}){mark}"
        table.add_row(phase, format_bytes(peak.bytes), _bar(peak.bytes, largest), where)
    return table


def _sums(title: str, sums: Mapping[str, int | float], total: int, *, most: int = 40) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("what", "bytes", "share", ""):
        table.add_column(name, justify="right" if name in ("bytes", "share") else "left")
    for name, size in list(sums.items())[:most]:
        table.add_row(name, format_bytes(size), f"{size / total:.1%}", _bar(size, total))
    rest = sum(list(sums.values())[most:])
    if rest:
        table.add_row(f"{len(sums) - most} more", format_bytes(rest), f"{rest / total:.1%}", _bar(rest, total))
    return table


def _largest(timeline: Timeline, top: int) -> Table:
    table = Table(title="largest tensors alive at the peak", title_justify="left", box=None, pad_edge=False)
    for name in ("bytes", "shape", "dtype", "what", "made by", "saved by"):
        table.add_column(name, justify="right" if name == "bytes" else "left", overflow="fold")
    for item in timeline.peak.live[:top]:
        s = item.storage
        made = f"{item.module or 'the root module'} ({item.op})"
        shape = "x".join(map(str, s.shape)) or "scalar"
        table.add_row(format_bytes(item.bytes), shape, s.dtype, item.category.value, made, s.saved_by)
    return table


def folded(sums: Mapping[str, int]) -> dict[str, int]:
    """Modules of the same path but for their index, together: ``layers.*.mlp``."""
    folded: dict[str, int] = {}
    for path, size in sums.items():
        name = ".".join("*" if part.isdigit() else part for part in path.split(".")) or "the root module"
        folded[name] = folded.get(name, 0) + size
    return dict(sorted(folded.items(), key=lambda pair: -pair[1]))


def _bar(size: float, total: float) -> str:
    return "█" * round(BAR * size / total) if total else ""


def timeline_json(timeline: Timeline, *, top: int = 20) -> dict[str, object]:
    """The same findings for programs, unrounded."""
    peak = timeline.peak
    phases = {}
    for phase, _ in timeline.phases:
        found = timeline.peak_in(phase)
        phases[phase] = {"bytes": found.bytes, "event": str(found.event), "memory": found.ledger.to_json()}
    return {
        "name": timeline.name,
        "predicted": {"memory": peak.ledger.to_json()},
        "peak": {
            "bytes": peak.bytes, "event": str(peak.event), "phase": peak.event.phase, "module": peak.event.module,
            "op": peak.event.op, "by_category": peak.by_category, "by_module": peak.by_module, "by_op": peak.by_op,
        },
        "phases": phases,
        "largest": [
            {
                "bytes": item.bytes, "shape": list(item.storage.shape), "dtype": item.storage.dtype,
                "category": item.category.value, "module": item.module, "op": item.op,
                "saved_by": item.storage.saved_by,
            }
            for item in peak.live[:top]
        ],
        "num_events": len(timeline.events), "num_storages": len(timeline.storages),
        "notes": list(timeline.notes), "seconds": timeline.seconds,
    }  # fmt: skip
