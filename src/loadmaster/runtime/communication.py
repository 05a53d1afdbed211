"""The communication thread: collectives run behind the compute in the order they are issued, and can be waited for.

One thread, one queue: every rank issues the same collectives in the same order, so they meet. The main thread never
blocks inside the backend; it waits on an event, in which another rank's failure or a timeout reaches it. On a GPU
the thread launches on a stream of its own and waiting orders streams instead of blocking the host.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from loadmaster.runtime.traffic import TrafficMeter, TrafficRecord

__all__ = ["Communication", "Handle"]

# what to run: its handle, the work, the compute stream's event it must wait for, the step it belongs to
_Job = tuple["Handle", Callable[[], None], Any, TrafficRecord]


class Handle:
    """A collective under way; `wait` returns when its result may be read."""

    __slots__ = ("_done", "_owner", "cuda_event", "error", "name")

    def __init__(self, name: str, owner: Communication) -> None:
        self.name, self._owner = name, owner
        self._done = threading.Event()
        self.error: BaseException | None = None
        self.cuda_event: torch.cuda.Event | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended (on a GPU: been launched)."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait, counting the time as exposed communication of the axis in the handle's name."""
        if not self._done.is_set():
            start = time.perf_counter()
            self._owner.block(self)
            self._owner.exposed[self.name.split("/")[0]] += time.perf_counter() - start
        if self.error is not None:
            raise self.error
        if self.cuda_event is not None:
            torch.cuda.current_stream().wait_event(self.cuda_event)


class Communication:
    """Owns the thread. `check` is called while waiting and raises when another rank has failed or time is up."""

    def __init__(
        self, device: torch.device, meter: TrafficMeter,
        check: Callable[[str, float], None] = lambda name, waited: None,
    ) -> None:  # fmt: skip
        self.exposed: dict[str, float] = defaultdict(float)
        self.check = check
        self._meter = meter
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="loadmaster-communication", daemon=True)
        self._thread.start()

    def submit(self, name: str, job: Callable[[], None]) -> Handle:
        """Queue `job`; `name` is ``axis/what``, for messages and for the time ledger."""
        handle = Handle(name, self)
        ready = torch.cuda.current_stream(self._device).record_event() if self._stream is not None else None
        self._jobs.put((handle, job, ready, self._meter.record))
        return handle

    def block(self, handle: Handle) -> None:
        """Block the caller until `handle` is done."""
        start = time.perf_counter()
        while not handle._done.wait(0.05):
            self.check(handle.name, time.perf_counter() - start)

    def close(self) -> None:
        """Let the thread end after what is queued."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            handle, job, ready, self._meter.active = item
            try:
                self._execute(handle, job, ready)
            except BaseException as error:
                handle.error = error
            handle._done.set()

    def _execute(self, handle: Handle, job: Callable[[], None], ready: Any) -> None:
        with torch.no_grad():
            if self._stream is None:
                job()
                return
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                job()
                handle.cuda_event = self._stream.record_event()
