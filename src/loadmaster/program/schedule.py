"""Pipeline schedules as tables: who does what, in which order, checked; replay gives time, bubble, peak in flight.

An action is a forward F, a backward B (a whole one, or the input's gradient alone where a schedule splits it) or
the weights' gradient W, of one micro-batch through one stage. Orders: GPipe (Huang et al. 2019, arXiv 1811.06965),
1F1B and interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473), zero bubble H1 (Qi et al. 2024, arXiv 2401.10241),
ZB-V (Qi et al. 2024, arXiv 2405.15362), DualPipe-V (DeepSeek-AI 2025, arXiv 2412.19437, folded).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from loadmaster.errors import InvalidInput
from loadmaster.program.stages import V_SCHEDULES

__all__ = ["SPLIT_BACKWARD", "Action", "Replay", "Schedule", "build_schedule"]

SPLIT_BACKWARD = ("zb_h1", "zb_v", "dualpipe_v")


@dataclass(frozen=True, slots=True)
class Action:
    """One cell: `kind` F, B or W; `whole`: a B that makes the weights' gradient too."""

    kind: str
    micro_batch: int
    chunk: int
    whole: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a table takes.

    Attributes:
        seconds: first start to last end; busy: per rank; peak: most micro-batch chunks held at once, per rank.
        starts: start of each action, per rank.
    """

    seconds: float
    busy: tuple[float, ...]
    peak: tuple[int, ...]
    starts: tuple[tuple[float, ...], ...]

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all ranks' time."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The order of every rank's actions.

    Attributes:
        name: one of `describe.layout.SCHEDULES`; pp ranks, `num_micro_batches`, `virtual_stages` chunks a rank.
        actions: one row a rank.

    >>> table = build_schedule("1f1b", pp=4, num_micro_batches=2)
    >>> table.warmup_forwards(), round(table.replay().bubble_fraction, 3)
    ((2, 2, 2, 1), 0.6)
    """

    name: str
    pp: int
    num_micro_batches: int
    virtual_stages: int
    actions: tuple[tuple[Action, ...], ...]

    def stage(self, rank: int, chunk: int) -> int:
        """Place in the model of a rank's chunk."""
        folded = self.name in V_SCHEDULES and chunk % 2
        return chunk * self.pp + (self.pp - 1 - rank if folded else rank)

    def check(self) -> Schedule:
        """Every micro-batch passes every chunk forward and backward exactly once, and nothing waits for ever."""
        want = {(i, c) for i in range(self.num_micro_batches) for c in range(self.virtual_stages)}
        for rank, row in enumerate(self.actions):
            for kind in "FB":
                seen = [(a.micro_batch, a.chunk) for a in row if a.kind == kind]
                assert sorted(seen) == sorted(want), f"{self.name}: rank {rank} lacks a {kind}"
            halves = sorted((a.micro_batch, a.chunk) for a in row if a.kind == "B" and not a.whole)
            weights = sorted((a.micro_batch, a.chunk) for a in row if a.kind == "W")
            assert halves == weights, f"{self.name}: rank {rank}: a split backward lacks its W"
        self.replay()
        return self

    def warmup_forwards(self) -> tuple[int, ...]:
        """Forwards of each rank before its first backward."""
        return tuple(next(i for i, a in enumerate(row) if a.kind == "B") for row in self.actions)

    def replay(
        self,
        forward: float | Callable[[int], float] = 1.0,
        backward: float | Callable[[int], float] = 2.0,
        weight: float | Callable[[int], float] | None = None,
        *,
        send: float = 0.0,
    ) -> Replay:
        """Run the table.

        Args:
            forward, backward: seconds of a stage, or a function of the stage's index; `backward` is whole.
            weight: the part of `backward` that is the weights' gradient (half of it when None).
            send: seconds between neighbouring stages on different ranks.

        Raises:
            AssertionError: the table deadlocks (a bug of ours, found before anything is launched).
        """
        last = self.pp * self.virtual_stages - 1
        cost = _costs(forward, backward, weight)
        done: dict[tuple[str, int, int], tuple[float, int]] = {}
        clock, at = [0.0] * self.pp, [0] * self.pp
        starts: list[list[float]] = [[] for _ in range(self.pp)]
        queue = deque(range(self.pp))
        idle = 0
        while queue and idle <= len(queue):
            rank = queue.popleft()
            moved = False
            while at[rank] < len(self.actions[rank]):
                action = self.actions[rank][at[rank]]
                stage = self.stage(rank, action.chunk)
                ready = _ready(action, stage, last, rank, done, send)
                if ready is None:
                    break
                start = max(clock[rank], ready)
                clock[rank] = start + cost(action, stage)
                done[action.kind, stage, action.micro_batch] = (clock[rank], rank)
                starts[rank].append(start)
                at[rank] += 1
                moved = True
            idle = 0 if moved else idle + 1
            if at[rank] < len(self.actions[rank]):
                queue.append(rank)
        assert not queue, f"{self.name} with pp={self.pp}, {self.num_micro_batches} micro-batches deadlocks"
        busy = tuple(sum(cost(a, self.stage(r, a.chunk)) for a in row) for r, row in enumerate(self.actions))
        peak = tuple(_peak_in_flight(row) for row in self.actions)
        return Replay(seconds=max(clock), busy=busy, peak=peak, starts=tuple(map(tuple, starts)))


def _costs(
    forward: float | Callable[[int], float],
    backward: float | Callable[[int], float],
    weight: float | Callable[[int], float] | None,
) -> Callable[[Action, int], float]:
    def at(value: float | Callable[[int], float], stage: int) -> float:
        return value(stage) if callable(value) else value

    def cost(action: Action, stage: int) -> float:
        if action.kind == "F":
            return at(forward, stage)
        whole = at(backward, stage)
        part = whole / 2 if weight is None else at(weight, stage)
        if action.kind == "W":
            return part
        return whole if action.whole else whole - part

    return cost


def _ready(
    action: Action, stage: int, last: int, rank: int, done: dict[tuple[str, int, int], tuple[float, int]], send: float
) -> float | None:
    """When what the action waits for has arrived, or None while it has not been made."""
    i = action.micro_batch
    match action.kind:
        case "F":
            needs = [("F", stage - 1, i)] if stage else []
        case "B":
            needs = [("F", stage, i)] + ([("B", stage + 1, i)] if stage < last else [])
        case _:
            needs = [("B", stage, i)]
    ready = 0.0
    for need in needs:
        if need not in done:
            return None
        end, source = done[need]
        ready = max(ready, end + (send if source != rank else 0.0))
    return ready


def _peak_in_flight(row: Sequence[Action]) -> int:
    """Most (micro-batch, chunk) forwards whose backward, weights' part included, has not ended."""
    held = peak = 0
    for action in row:
        if action.kind == "F":
            held += 1
        elif action.kind == "W" or action.whole:
            held -= 1
        peak = max(peak, held)
    return peak


@lru_cache(maxsize=256)
def build_schedule(name: str, *, pp: int, num_micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """The checked table of a schedule.

    Raises:
        InvalidInput: the schedule cannot run with these numbers; the nearest that can are named.
    """
    m, v = num_micro_batches, virtual_stages
    if pp == 1:
        row = tuple(Action(kind, i, 0) for i in range(m) for kind in "FB")
        return Schedule(name=name, pp=1, num_micro_batches=m, virtual_stages=1, actions=(row,)).check()
    if name in V_SCHEDULES:
        v = 2
    elif name != "interleaved_1f1b" and v != 1:
        raise InvalidInput(
            "layout.virtual_stages", v, f"{name} has one chunk a rank", "use interleaved_1f1b, zb_v or dualpipe_v"
        )
    builders: dict[str, Callable[[int, int, int], list[list[Action]]]] = {
        "gpipe": _gpipe, "1f1b": _one_f_one_b, "interleaved_1f1b": _interleaved,
        "zb_h1": _zero_bubble_h1, "zb_v": _zero_bubble_v, "dualpipe_v": _dualpipe_v,
    }  # fmt: skip
    if name not in builders:
        raise InvalidInput("layout.schedule", name, "is not known", f"use one of {', '.join(builders)}")
    rows = builders[name](pp, m, v)
    table = Schedule(name=name, pp=pp, num_micro_batches=m, virtual_stages=v, actions=tuple(map(tuple, rows)))
    return table.check()


def _gpipe(pp: int, m: int, v: int) -> list[list[Action]]:
    return [[Action(kind, i, 0) for kind in "FB" for i in range(m)] for _ in range(pp)]


def _one_f_one_b(pp: int, m: int, v: int) -> list[list[Action]]:
    """Warm up with min(m, pp - rank - 1) forwards, then one forward and one backward in turn."""
    return [
        _alternate([Action("F", i, 0) for i in range(m)], [Action("B", i, 0) for i in range(m)], min(m, pp - rank - 1))
        for rank in range(pp)
    ]


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    row = forwards[:warmup]
    for i, backward in enumerate(backwards):
        row += [*forwards[warmup + i : warmup + i + 1], backward]
    return row


def _interleaved(pp: int, m: int, v: int) -> list[list[Action]]:
    """Groups of pp micro-batches pass every chunk in turn; 2 (pp - rank - 1) + (v - 1) pp forwards to warm up."""
    if m % pp:
        near = f"{m // pp * pp} or {-(-m // pp) * pp}" if m >= pp else f"{pp}"
        raise InvalidInput(
            "layout.schedule", "interleaved_1f1b", f"needs micro-batches in groups of pp={pp}, not {m}",
            f"use {near} micro-batches, or 1f1b",
        )  # fmt: skip
    if v < 2:
        return _one_f_one_b(pp, m, v)
    groups = range(0, m, pp)
    forwards = [Action("F", g + i, c) for g in groups for c in range(v) for i in range(pp)]
    backwards = [Action("B", g + i, c) for g in groups for c in reversed(range(v)) for i in range(pp)]
    return [_alternate(forwards, backwards, min(m * v, 2 * (pp - r - 1) + (v - 1) * pp)) for r in range(pp)]


def _zero_bubble_h1(pp: int, m: int, v: int) -> list[list[Action]]:
    """1F1B with the weights' gradients of rank r running r micro-batches late, so that they fill the drain.

    Every rank then holds pp micro-batches, as much as 1F1B's first rank.
    """
    rows = []
    for rank in range(pp):
        warmup = min(m, pp - rank - 1)
        row = [Action("F", i, 0) for i in range(warmup)]
        for i in range(m):
            row += [Action("F", warmup + i, 0)] if warmup + i < m else []
            row.append(Action("B", i, 0, whole=False))
            row += [Action("W", i - rank, 0)] if i >= rank else []
        rows.append(row + [Action("W", i, 0) for i in range(max(0, m - rank), m)])
    return rows


def _zero_bubble_v(pp: int, m: int, v: int) -> list[list[Action]]:
    """Greedy in unit time (F = B = W): a backward as soon as it can, a forward while memory allows, W in the gaps.

    Every rank holds at most 2 pp half-size chunks, as much as 1F1B's first rank.
    """
    last = pp * v - 1
    table = Schedule(name="zb_v", pp=pp, num_micro_batches=m, virtual_stages=v, actions=())
    ends: dict[tuple[str, int, int], int] = {}
    rows: list[list[Action]] = [[] for _ in range(pp)]
    next_f = [[0] * v for _ in range(pp)]
    next_b = [[0] * v for _ in range(pp)]
    weights: list[deque[tuple[int, int]]] = [deque() for _ in range(pp)]
    held, slot = [0] * pp, 0
    while any(len(row) < 3 * m * v for row in rows):
        made: list[tuple[str, int, int]] = []
        for rank in range(pp):
            choice = _choose(table, rank, slot, ends, next_f[rank], next_b[rank], held[rank], last)
            if choice is None and weights[rank]:
                i, c = weights[rank].popleft()
                choice = Action("W", i, c)
                held[rank] -= 1
            if choice is None:
                continue
            rows[rank].append(choice)
            if choice.kind == "F":
                next_f[rank][choice.chunk] += 1
                held[rank] += 1
            elif choice.kind == "B":
                next_b[rank][choice.chunk] += 1
                weights[rank].append((choice.micro_batch, choice.chunk))
            made.append((choice.kind, table.stage(rank, choice.chunk), choice.micro_batch))
        slot += 1
        ends.update(dict.fromkeys(made, slot))
        assert slot < 12 * (m * v + pp), "the zero-bubble builder stalls"
    return rows


def _choose(
    table: Schedule, rank: int, slot: int, ends: dict[tuple[str, int, int], int],
    next_f: list[int], next_b: list[int], held: int, last: int,
) -> Action | None:  # fmt: skip
    """B before F; the deeper chunk first, since it frees memory sooner."""
    for chunk in reversed(range(table.virtual_stages)):
        i, stage = next_b[chunk], table.stage(rank, chunk)
        above = stage == last or ends.get(("B", stage + 1, i), slot + 1) <= slot
        if i < table.num_micro_batches and above and ends.get(("F", stage, i), slot + 1) <= slot:
            return Action("B", i, chunk, whole=False)
    for chunk in reversed(range(table.virtual_stages)):
        i, stage = next_f[chunk], table.stage(rank, chunk)
        # a rank keeps room for its second chunk, or the first would fill it and nothing could come back
        room = held < 2 * table.pp - (chunk == 0)
        below = stage == 0 or ends.get(("F", stage - 1, i), slot + 1) <= slot
        if i < table.num_micro_batches and room and below:
            return Action("F", i, chunk)
    return None


def _dualpipe_v(pp: int, m: int, v: int) -> list[list[Action]]:
    """Eight phases a rank; forwards of one chunk meet backwards of the other, so their communication hides."""
    if m < 2 * pp:
        raise InvalidInput(
            "layout.schedule", "dualpipe_v", f"needs at least 2 pp = {2 * pp} micro-batches, not {m}",
            "use more micro-batches, or zb_v",
        )  # fmt: skip
    return [_dualpipe_v_row(rank, pp, m) for rank in range(pp)]


def _dualpipe_v_row(rank: int, pp: int, m: int) -> list[Action]:
    row: list[Action] = []
    counts = {("F", 0): 0, ("F", 1): 0, ("B", 0): 0, ("B", 1): 0}
    waiting: deque[tuple[int, int]] = deque()

    def add(kind: str, chunk: int = 0, *, whole: bool = True) -> None:
        if kind == "W":
            i, chunk = waiting.popleft()
        else:
            i = counts[kind, chunk]
            counts[kind, chunk] += 1
        if kind == "B" and not whole:
            waiting.append((i, chunk))
        row.append(Action(kind, i, chunk, whole=whole))

    after = pp - rank - 1
    for _ in range(2 * after):
        add("F", 0)
    for _ in range(rank + 1):
        add("F", 0)
        add("F", 1)
    for _ in range(after):
        add("B", 1, whole=False)
        add("W")
        add("F", 1)
    for _ in range(m - 2 * pp + rank + 1):
        add("F", 0)
        add("B", 1)
        add("F", 1)
        add("B", 0)
    for _ in range(after):
        add("B", 1)
        add("F", 1)
        add("B", 0)
    half = (rank + 1) // 2
    for i in range(rank + 1):
        # the second half splits its backwards, so that the last phases can fill the drain with weights' gradients
        add("B", 1, whole=not (i > half or (i == half and rank % 2 == 1)))
        add("B", 0, whole=i < half)
    for _ in range(after):
        add("W")
        add("B", 0, whole=False)
    while waiting:
        add("W")
    return row
