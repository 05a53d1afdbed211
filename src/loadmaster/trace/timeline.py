"""The memory of a step as a table: which storage was born and died at which op, what it was and who kept it.

Torch-free, so that a timeline can be read, drawn and replayed anywhere. Bytes are those of whole storages: views cost
nothing, and two tensors on one storage count once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from loadmaster.ledger import Ledger

__all__ = ["CAST_TERM", "Category", "Event", "Live", "Peak", "Storage", "Timeline", "sum_by"]

Ints = npt.NDArray[np.int64]


class Category(StrEnum):
    """What a storage is for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"  # state kept between steps
    INPUT = "input"
    ACTIVATION = "activation"  # saved by autograd for backward
    COMMUNICATION = "communication"  # made by a collective, or gathered
    TEMPORARY = "temporary"


CAST_TERM = "parameters/cast"
TERMS = {
    Category.PARAMETER: "parameters",
    Category.GRADIENT: "gradients",
    Category.OPTIMIZER: "optimizer",
    Category.ACTIVATION: "activations",
    Category.INPUT: "batch",
    Category.COMMUNICATION: "buffers/communication",
    Category.BUFFER: "buffers/model",
    Category.TEMPORARY: "transient",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One op as dispatched.

    Attributes:
        phase: ``forward``, ``backward``, ``optimizer``, ... of a step, e.g. ``forward 2`` for the second.
        module: path of the module whose code (or whose backward) ran it; empty for the root.
        op: ``aten.mm.default``; source: in backward, the forward op that it differentiates.
        recompute: it repeats a forward inside backward.
    """

    index: int
    phase: str
    module: str
    op: str
    source: str = ""
    recompute: bool = False

    def __str__(self) -> str:
        what = "recompute" if self.recompute else self.phase
        of = f", backward of {self.source}" if self.source and not self.recompute else ""
        return f"{what} of {self.module or 'the root module'} ({self.op}{of})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One storage from birth to death.

    Attributes:
        bytes: its largest size; dtype, shape: of the tensor that was born with it.
        category: what it became (a gradient is one from birth); term: name in a ledger.
        birth: index of the event that made it; death: of the last event that ran before it died, None: never.
        saved_from, saved_until: events between which autograd held it for backward, None if it never did
            (or, for the latter, if it held it to the end).
        saved_by: ``module (op)`` that saved it first.
        name: of a parameter, buffer, gradient, input or optimizer state; owner: path of the module it belongs to.
    """

    index: int
    bytes: int
    dtype: str
    shape: tuple[int, ...]
    category: Category
    term: str
    birth: int
    death: int | None = None
    saved_from: int | None = None
    saved_until: int | None = None
    saved_by: str = ""
    name: str = ""
    owner: str = ""

    def outlives(self, event: int) -> bool:
        """Whether it is alive after `event`."""
        return self.death is None or self.death > event

    def category_at(self, event: int) -> Category:
        """An activation that autograd has let go of, but that still lives, is a temporary."""
        if self.category is Category.ACTIVATION and self.saved_until is not None and event > self.saved_until:
            return Category.TEMPORARY
        return self.category


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A storage alive at a moment, with the bytes it had then."""

    storage: Storage
    bytes: int
    category: Category
    module: str
    op: str

    @property
    def term(self) -> str:
        """Its name in a memory ledger."""
        return TERMS[self.category] if self.category is not self.storage.category else self.storage.term


def sum_by(live: Iterable[Live], key: Callable[[Live], str]) -> dict[str, int]:
    """Bytes summed by `key`, largest first."""
    sums: dict[str, int] = {}
    for item in live:
        sums[key(item)] = sums.get(key(item), 0) + item.bytes
    return dict(sorted(sums.items(), key=lambda pair: -pair[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The moment at which most bytes are alive, and what they are."""

    event: Event
    bytes: int
    position: int
    live: tuple[Live, ...]

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes by category, largest first."""
        return sum_by(self.live, lambda item: item.category.value)

    @property
    def by_module(self) -> dict[str, int]:
        """Bytes by the path of the module that made them."""
        return sum_by(self.live, lambda item: item.module)

    @property
    def by_op(self) -> dict[str, int]:
        """Bytes by the op that made them."""
        return sum_by(self.live, lambda item: item.op)

    @property
    def ledger(self) -> Ledger:
        """Bytes under the names of the product's memory ledger."""
        return Ledger("bytes", sum_by(self.live, lambda item: item.term))


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Everything that happened to memory in the traced steps.

    Attributes:
        events: ops in order; storages: by index.
        delta_event, delta_storage, delta_bytes: changes in the order they happened (+ birth or growth, - death);
            changes before the first op carry event 0.
        phases: (name, index of its first event).
        notes: what a reader must know, e.g. that routing was assumed.
        flops: of the events that multiply matrices, where they were counted.
    """

    events: tuple[Event, ...]
    storages: tuple[Storage, ...]
    delta_event: Ints
    delta_storage: Ints
    delta_bytes: Ints
    phases: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()
    flops: Mapping[int, int] = field(default_factory=dict)
    name: str = ""
    seconds: float = field(default=0.0, compare=False)

    @cached_property
    def live_bytes(self) -> Ints:
        """Bytes alive after each change."""
        return np.cumsum(self.delta_bytes, dtype=np.int64)

    @cached_property
    def peak(self) -> Peak:
        """The first moment of most bytes in the steps; building the module counts only where nothing else ran."""
        first = next((e for name, e in self.phases if name not in ("setup", "start")), 0)
        begin = int(np.searchsorted(self.delta_event, first))
        return self._peak_between(begin if begin < len(self.delta_bytes) else 0, len(self.delta_bytes))

    @property
    def peak_bytes(self) -> int:
        """Bytes alive at the peak."""
        return self.peak.bytes

    def peak_in(self, phase: str) -> Peak:
        """The peak inside one phase (of a pipeline: over all its forwards, or backwards).

        Raises:
            KeyError: no such phase.
        """
        places = [i for i, (name, _) in enumerate(self.phases) if name == phase]
        if not places:
            raise KeyError(phase)
        peaks = [self._peak_of(place) for place in places]
        return max(peaks, key=lambda peak: peak.bytes)

    def _peak_of(self, place: int) -> Peak:
        """The peak inside one of the phases, by its place in the list."""
        first = self.phases[place][1]
        last = self.phases[place + 1][1] if place + 1 < len(self.phases) else len(self.events)
        inside = np.flatnonzero((self.delta_event >= first) & (self.delta_event < last))
        if not len(inside):
            before = int(np.searchsorted(self.delta_event, first))
            return self._peak_between(max(before - 1, 0), max(before, 1))
        return self._peak_between(int(inside[0]), int(inside[-1]) + 1)

    def _peak_between(self, first: int, last: int) -> Peak:
        position = first + int(np.argmax(self.live_bytes[first:last]))
        return Peak(
            event=self.events[int(self.delta_event[position])],
            bytes=int(self.live_bytes[position]),
            position=position,
            live=self.live_at(position),
        )

    def live_at(self, position: int) -> tuple[Live, ...]:
        """What is alive after change number `position`, largest first."""
        sizes = np.zeros(len(self.storages), dtype=np.int64)
        np.add.at(sizes, self.delta_storage[: position + 1], self.delta_bytes[: position + 1])
        event = int(self.delta_event[position])
        alive = [self.storages[i] for i in np.flatnonzero(sizes)]
        found = [
            Live(
                storage=s,
                bytes=int(sizes[s.index]),
                category=s.category_at(event),
                module=s.owner or self.events[s.birth].module,
                op=s.name or self.events[s.birth].op,
            )
            for s in alive
        ]
        return tuple(sorted(found, key=lambda item: -item.bytes))

    def series(self) -> tuple[Ints, dict[str, Ints]]:
        """For drawing: the event of each change of any category, and the bytes alive of each category after it."""
        order = list(Category)
        moves: list[tuple[int, int, int, int]] = []
        for n, (event, storage, size) in enumerate(
            zip(self.delta_event.tolist(), self.delta_storage.tolist(), self.delta_bytes.tolist(), strict=True)
        ):
            moves.append((event, n, order.index(self.storages[storage].category_at(event)), size))
        for s in self.storages:
            if s.category is Category.ACTIVATION and s.saved_until is not None and s.outlives(s.saved_until):
                moves.append((s.saved_until + 1, -1, order.index(Category.ACTIVATION), -s.bytes))
                moves.append((s.saved_until + 1, -1, order.index(Category.TEMPORARY), s.bytes))
        moves.sort()
        table = np.zeros((len(moves), len(order)), dtype=np.int64)
        for row, (_, _, column, size) in enumerate(moves):
            table[row, column] = size
        table = np.cumsum(table, axis=0)
        events = np.array([event for event, *_ in moves], dtype=np.int64)
        return events, {c.value: table[:, i] for i, c in enumerate(order)}

    def saved_bytes(self, prefix: str = "", *, phase: str = "forward") -> int:
        """Bytes that autograd holds for backward at the end of `phase` and that modules below `prefix` made or saved.

        Parameters, buffers and inputs that are saved as well cost nothing more and are not counted, nor are the casts
        of parameters that autocast makes.
        """
        return sum(s.bytes for s in self.saved(prefix, phase=phase))

    def saved(self, prefix: str = "", *, phase: str = "forward") -> tuple[Storage, ...]:
        """The storages of `saved_bytes`: those whose first saver lies below `prefix`."""
        names = [name for name, _ in self.phases]
        place = names.index(phase)
        first = self.phases[place][1]
        end = self.phases[place + 1][1] if place + 1 < len(self.phases) else len(self.events)
        return tuple(
            s
            for s in self.storages
            if s.category is Category.ACTIVATION
            and s.term != CAST_TERM
            and s.saved_from is not None
            and first <= s.saved_from < end
            and (s.saved_until is None or s.saved_until >= end)
            and (
                not prefix
                or s.saved_by == prefix
                or s.saved_by.startswith(prefix + ".")
                or s.saved_by.startswith(prefix + " ")
            )
        )
