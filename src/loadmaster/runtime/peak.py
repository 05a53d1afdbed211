"""The most bytes of tensors alive during a step: the allocator's own counts, not the process's resident size."""

from __future__ import annotations

from types import TracebackType

import torch

__all__ = ["PeakMeter"]


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
        self._profile: torch.profiler.profile | None = None

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


def _highest(profile: torch.profiler.profile) -> int:
    """Highest running sum of the memory events, in the order of time."""
    recorded = profile.profiler
    assert recorded is not None
    assert recorded.kineto_results is not None
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    alive = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        highest = max(highest, alive)
    return highest
