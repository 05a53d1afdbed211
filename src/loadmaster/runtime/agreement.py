"""Agreement on failure: one rank's exception ends the step on all within a second, by name; a watchdog ends a hang.

Every rank polls the job's store in a thread. A rank that fails writes who, where and why under one key; the others
find it while they compute or wait and raise the same error. A wait that outlasts the timeout asks the store where
every rank last was and names those behind. A rank that dies without a word is known by its silent heartbeat.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from loadmaster.errors import LoadmasterError

__all__ = ["Agreement", "Place", "RankFailure"]

_POLL = 0.2  # seconds between looks at the store
_BEAT = 0.5  # seconds between heartbeats
_SILENT = 2.0  # seconds without a heartbeat after which a rank is taken for dead
_generation = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is: window, stage, micro-batch and action."""

    step: int = 0
    stage: int = 0
    micro_batch: int | None = None
    action: str = "start"

    def __str__(self) -> str:
        batch = "" if self.micro_batch is None else f" of micro-batch {self.micro_batch}"
        return f"step {self.step}, stage {self.stage}, {self.action}{batch}"


class RankFailure(LoadmasterError):
    """A rank failed; the same on every rank.

    Attributes:
        rank: which one; place: where it was; reason: its error in a line; trace: its traceback, for logs.
    """

    exit_status = 1

    def __init__(self, rank: int, place: Place, reason: str, trace: str = "") -> None:
        self.rank, self.place, self.reason, self.trace = rank, place, reason, trace
        super().__init__(f"rank {rank} failed at {place}: {reason}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.place, self.reason, self.trace)


class Agreement:
    """One per engine. `at` is cheap and says where this rank is; `check` raises what another rank reported."""

    def __init__(self, rank: int, size: int, *, timeout: float = 600.0) -> None:
        global _generation
        _generation += 1
        self.rank, self.size, self.timeout = rank, size, timeout
        self.place = Place()
        self._waiting = ""
        self._failure: RankFailure | None = None
        self._stop = threading.Event()
        self._store: Any = None
        self._prefix = f"loadmaster/{_generation}"
        if size > 1:
            self._store = _own_connection()
            self._thread = threading.Thread(target=self._watch, name="loadmaster-agreement", daemon=True)
            self._thread.start()

    def at(self, step: int, action: str, micro_batch: int | None = None, stage: int = 0) -> None:
        """Say where this rank is, and raise if another has failed."""
        self.place, self._waiting = Place(step, stage, micro_batch, action), ""
        self.look()

    def look(self) -> None:
        """Raise if another rank has failed."""
        if self._failure is not None:
            raise self._failure

    def check(self, name: str, waited: float) -> None:
        """Called while waiting for the collective `name`; ends a hang."""
        self.look()
        self._waiting = name
        if waited > self.timeout:
            raise self._publish(self._blame(f"rank {self.rank} waited {waited:.0f} s for {name}"))

    def report(self, error: BaseException) -> RankFailure:
        """Tell all ranks of this rank's error and return what to raise; an earlier report of another wins."""
        if isinstance(error, RankFailure):
            return error
        trace = "".join(traceback.format_exception(error))
        failure = RankFailure(self.rank, self.place, f"{type(error).__name__}: {error}", trace)
        if self._store is not None and _is_lost_peer(error):
            self._wait_for_a_reason()
            failure = self._failure or self._blame(f"rank {self.rank} lost its connection")
        return self._publish(failure)

    def _publish(self, failure: RankFailure) -> RankFailure:
        if self._failure is None:
            self._failure = failure
            if self._store is not None:
                self._tell(failure)
        return self._failure

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()

    def _tell(self, failure: RankFailure) -> None:
        text = json.dumps(
            {"rank": failure.rank, "place": asdict(failure.place), "reason": failure.reason, "trace": failure.trace}
        )
        try:
            self._store.compare_set(f"{self._prefix}/failure", "", text)
        except RuntimeError:
            return  # the store's host is gone; the others notice that themselves

    def _watch(self) -> None:
        last_beat = 0.0
        while not self._stop.wait(_POLL):
            try:
                if time.monotonic() - last_beat > _BEAT:
                    last_beat = time.monotonic()
                    beat = {"time": time.time(), "place": asdict(self.place), "waiting": self._waiting}
                    self._store.set(self._beat_key(self.rank), json.dumps(beat))
                if self._store.check([f"{self._prefix}/failure"]):
                    told = json.loads(self._store.get(f"{self._prefix}/failure"))
                    if told["rank"] != self.rank:
                        place = Place(**told["place"])
                        self._failure = RankFailure(told["rank"], place, told["reason"], told["trace"])
                    return
            except (RuntimeError, ValueError):
                if not self._stop.is_set():
                    self._failure = RankFailure(0, self.place, "the job's store is gone: its process has ended")
                return

    def _beat_key(self, rank: int) -> str:
        return f"{self._prefix}/beat/{rank}"

    def _beats(self) -> dict[int, dict[str, Any]]:
        """The last heartbeat of every rank that gave one."""
        keys = {rank: self._beat_key(rank) for rank in range(self.size)}
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def _blame(self, symptom: str) -> RankFailure:
        """Who is behind a wait or a lost connection: a silent rank, else one that waits for nobody."""
        try:
            beats = self._beats()
        except RuntimeError:
            return RankFailure(0, self.place, f"{symptom}; the job's store is gone: its process has ended")
        others = [r for r in range(self.size) if r != self.rank]
        for rank in others:
            if rank not in beats or time.time() - beats[rank]["time"] > _SILENT:
                place = Place(**beats[rank]["place"]) if rank in beats else Place()
                return RankFailure(rank, place, f"silent: killed or frozen; {symptom}")
        for rank in others:
            if not beats[rank]["waiting"]:
                return RankFailure(rank, Place(**beats[rank]["place"]), f"does not come on; {symptom}")
        return RankFailure(self.rank, self.place, f"{symptom}, and so does every other rank")

    def _wait_for_a_reason(self) -> None:
        """A broken connection is an echo: give the rank that broke it time to say why, or to fall silent."""
        deadline = time.monotonic() + _SILENT + 2 * _BEAT
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(0.02)


def _is_lost_peer(error: BaseException) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("connection", "reset by peer", "broken pipe", "closed by peer", "nccl"))


def _own_connection() -> Any:
    """A connection of its own to the job's store: a blocking call elsewhere must not hold up the watch."""
    store = dist.distributed_c10d._get_default_store()
    try:
        return store.clone()  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError, NotImplementedError):
        return store
