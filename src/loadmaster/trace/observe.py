"""What a real run on this CPU really holds: PyTorch's allocator reports every allocation, and they are added up.

Independent of the tracer: no weak references, no ghosts. The profiler's memory reports give each allocation and
release; a mark around every op tells which lie between ops (tensors) and which live and die inside a kernel (scratch).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Observation", "observe"]

_MARK = "op:"
_Allocation = torch._C._profiler._EventType.Allocation


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A real run's memory.

    Attributes:
        peak_bytes: most bytes alive at the end of an op, of those that ops made; op: that op.
        unmarked_bytes: what was alive at that moment besides, made by no op: the eight bytes of a Python number that
            autograd saves (``x * 0.5``), and the states of the random generator that checkpoints keep (5056 each).
        scratch_bytes: most bytes by which a kernel exceeds that peak for scratch of its own; scratch_op: which.
    """

    peak_bytes: int
    op: str
    unmarked_bytes: int
    scratch_bytes: int
    scratch_op: str


class _Marks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts the name of each op into the profiler's record."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._profiler._RecordFunctionFast(_MARK + str(func)):
            return func(*args, **(kwargs or {}))


def _marks() -> Any:
    return _Marks()  # type: ignore[no-untyped-call]


def observe(run: Callable[[], Any]) -> Observation:
    """Call `run` (which must make everything it uses) and add up what it allocates."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, _marks():
        run()
    results: Any = profiler.profiler.kineto_results
    seen = _Sum()
    moments: list[_Moment] = []
    _collect(results.experimental_event_tree(), "", moments)
    for moment in sorted(moments):
        seen.take(moment)
    return Observation(
        peak_bytes=seen.peak, op=seen.op, unmarked_bytes=seen.unmarked_at_peak,
        scratch_bytes=max(seen.kernel_peak - seen.peak, 0), scratch_op=seen.kernel_op,
    )  # fmt: skip


_Moment = tuple[int, int, int, int, str]  # time, order, address, size (0: an op ends), op


def _collect(events: Iterable[Any], op: str, moments: list[_Moment]) -> None:
    """Allocations and ends of ops, on whatever thread they happen."""
    for event in events:
        if event.tag == _Allocation:
            fields = event.extra_fields
            moments.append((event.start_time_ns, len(moments), fields.ptr, fields.alloc_size, op))
            continue
        marked = event.name.startswith(_MARK)
        made = event.name.startswith("aten::empty")  # ``torch.tensor`` allocates before its op is dispatched
        name = event.name[len(_MARK) :] if marked else op or ("torch.tensor" if made else "")
        _collect(event.children, name, moments)
        if marked:
            moments.append((event.end_time_ns, len(moments), 0, 0, name))


class _Sum:
    """Running totals in order of time."""

    def __init__(self) -> None:
        self.live = self.peak = self.kernel_peak = self.unmarked = self.unmarked_at_peak = 0
        self.op = self.kernel_op = ""
        self.blocks: dict[int, tuple[int, bool]] = {}  # address -> size, whether an op made it

    def take(self, moment: _Moment) -> None:
        """An allocation, a release, or the end of an op, where the live bytes count."""
        _, _, address, size, op = moment
        if size:
            self.book(address, size, op)
        elif not address and self.live > self.peak:
            self.peak, self.op, self.unmarked_at_peak = self.live, op, self.unmarked

    def book(self, address: int, size: int, op: str) -> None:
        """One allocation, or the release of one seen before (what is older than the run is not its own)."""
        if size < 0:
            size, by_op = self.blocks.pop(address, (0, True))
            size = -size
        else:
            by_op = bool(op)
            self.blocks[address] = size, by_op
        if not by_op:
            self.unmarked += size
            return
        self.live += size
        if self.live > self.kernel_peak:
            self.kernel_peak, self.kernel_op = self.live, op
