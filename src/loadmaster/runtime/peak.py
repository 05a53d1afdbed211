"""The most bytes of tensors alive during a step: the allocator's own counts, not the process's resident size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch

from loadmaster.ledger import Ledger
from loadmaster.runtime.engine import Engine

__all__ = ["PeakMeter", "PeakStep"]


class PeakMeter:
    """Around one step: bytes beyond those alive before it, at the highest moment.

    On CUDA the caching allocator counts all the time. On the CPU the profiler hears of every allocation and release
    while it runs, which slows the step: one step of a run is measured so.

    >>> with PeakMeter(torch.device("cpu")) as meter:
    ...     kept = torch.zeros(1000) + torch.zeros(1000)
    >>> meter.rise
    12000
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.rise = device, 0
        self._before = 0
        self._profile: Any = None

    def __enter__(self) -> PeakMeter:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            self._profile = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
            )
            self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profile is None:
            torch.cuda.synchronize(self.device)
            self.rise = torch.cuda.max_memory_allocated(self.device) - self._before
            return
        self._profile.__exit__(kind, error, trace)
        self.rise = _highest(self._profile)
        self._profile = None


def _highest(profile: Any) -> int:
    """Highest running sum of the memory events, in the order of time."""
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        highest = max(highest, alive)
    return highest


class PeakStep:
    """Measures a settled step of a run: one that ends holding what it began with.

    Its ledger is what stays between steps and, beyond that, what was alive at the highest moment: weights gathered for
    a while (stage 3; the most there were at once) and, as one figure, activations and all else. A step that grew
    (recycled buffers come when they are first needed) is followed by another try.
    """

    TRIES = 5

    def __init__(self, engine: Engine, device: torch.device, *, step: int) -> None:
        self.engine, self.device, self.step = engine, device, step
        self.rise: int | None = None
        self._gathered = 0
        self._tries, self._settled = 0, False

    def around(self, step: int) -> contextlib.AbstractContextManager[object]:
        """The meter around `step` if it is one to measure, else nothing."""
        wanted = step >= self.step and not self._settled and self._tries < self.TRIES
        return self._measure() if wanted else contextlib.nullcontext()

    @contextlib.contextmanager
    def _measure(self) -> Iterator[None]:
        before = self.engine.memory_ledger().total
        counters = [bucket.counter for bucket in self.engine.assembly.weights[:1]]
        for counter in counters:
            counter.most = counter.live
        with PeakMeter(self.device) as meter:
            yield
        self._gathered = sum(counter.most for counter in counters)
        grown = int(self.engine.memory_ledger().total - before)
        self.rise = meter.rise - max(0, grown)
        self._tries, self._settled = self._tries + 1, not grown

    def ledger(self) -> Ledger:
        """At the peak; what is held, before a step was measured."""
        held = self.engine.memory_ledger()
        if self.rise is None:
            return held
        risen = {"activations": self.rise - self._gathered, "buffers/all_gather": self._gathered}
        return held + Ledger("bytes", {term: number for term, number in risen.items() if number})
