"""Where a step's time went on one rank: phases by wall clock, less what was spent waiting for communication."""

from __future__ import annotations

import time

from loadmaster.ledger import Ledger
from loadmaster.runtime.communication import Communication

__all__ = ["PhaseClock"]


class PhaseClock:
    """Laps of one step; waiting is taken out of the lap it fell into and booked under ``communication/<axis>``."""

    def __init__(self, communication: Communication | None) -> None:
        self._communication = communication
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0, "host": 0.0}
        self._waited = 0.0
        if communication is not None:
            communication.exposed.clear()

    def lap(self, phase: str) -> None:
        """Book the time since the last lap."""
        now = time.perf_counter()
        waited = sum(self._communication.exposed.values()) if self._communication is not None else 0.0
        self._seconds[phase] += now - self._start - (waited - self._waited)
        self._start, self._waited = now, waited

    def ledger(self) -> Ledger:
        """Phases and exposed communication by axis; their sum is the step."""
        exposed = self._communication.exposed if self._communication is not None else {}
        return Ledger("seconds", {**self._seconds, **{f"communication/{axis}": s for axis, s in exposed.items()}})
