"""A timeline as one self-contained HTML file: memory over the step by category, the peak marked, tensors on hover.

No network, no library: the figures lie in the file as JSON, and some hundred lines of script draw them as SVG.
"""

from __future__ import annotations

import html
import json
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from loadmaster.report.timeline_text import folded
from loadmaster.trace.timeline import Timeline
from loadmaster.units import format_bytes

__all__ = ["timeline_html"]

POINTS = 1600  # of the drawing; each keeps the largest total of the changes it stands for
TENSORS = 12  # named at each of the moments that have a list
MOMENTS = 240


def timeline_html(timeline: Timeline, *, capacity: int | None = None) -> str:
    """The page."""
    page = resources.files("loadmaster.report").joinpath("timeline.html").read_text(encoding="utf-8")
    data = json.dumps(_figures(timeline, capacity), separators=(",", ":")).replace("</", "<\\/")
    return page.replace("{{title}}", html.escape(timeline.name)).replace("{{data}}", data)


def _figures(timeline: Timeline, capacity: int | None) -> dict[str, Any]:
    events, series = timeline.series()
    names = [name for name in series if series[name].any()]
    table = np.stack([series[name] for name in names])
    kept = _thinned(table.sum(axis=0))
    peak = timeline.peak
    return {
        "name": timeline.name,
        "categories": names,
        "events": events[kept].tolist(),
        "bytes": table[:, kept].tolist(),
        "labels": {int(e): str(timeline.events[int(e)]) for e in np.unique(events[kept])},
        "phases": [[name, first] for name, first in timeline.phases],
        "num_events": len(timeline.events),
        "peak": {
            "event": peak.event.index, "bytes": peak.bytes, "label": str(peak.event),
            "live": _tensors(timeline, peak.position), "terms": dict(peak.ledger.terms),
            "modules": dict(list(folded(peak.by_module).items())[:TENSORS]),
        },
        "moments": _moments(timeline),
        "capacity": capacity,
        "notes": list(timeline.notes),
        "summary": f"{len(timeline.events)} ops, {len(timeline.storages)} storages; "
                   f"peak {format_bytes(peak.bytes)} in {peak.event}",
    }  # fmt: skip


def _thinned(totals: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Places to draw: of each run of changes its largest and its last, so that no peak is lost."""
    if len(totals) <= POINTS:
        return np.arange(len(totals))
    runs = np.array_split(np.arange(len(totals)), POINTS // 2)
    picked = [int(run[np.argmax(totals[run])]) for run in runs] + [int(run[-1]) for run in runs]
    return np.unique(np.array(picked, dtype=np.int64))


def _moments(timeline: Timeline) -> list[list[Any]]:
    """(event, largest tensors) at moments spread over the step, each at the largest total of its run."""
    runs = np.array_split(np.arange(len(timeline.delta_bytes)), min(MOMENTS, max(1, len(timeline.delta_bytes))))
    places = [int(run[np.argmax(timeline.live_bytes[run])]) for run in runs if len(run)]
    return [[int(timeline.delta_event[p]), _tensors(timeline, p, most=6)] for p in places]


def _tensors(timeline: Timeline, position: int, *, most: int = TENSORS) -> list[list[Any]]:
    return [
        [
            item.bytes, item.category.value, "x".join(map(str, item.storage.shape)) or "scalar", item.storage.dtype,
            f"{item.module} {item.op}".strip(), item.storage.saved_by,
        ]
        for item in timeline.live_at(position)[:most]
    ]  # fmt: skip
