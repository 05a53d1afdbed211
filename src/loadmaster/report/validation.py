"""Scoring the laws on measured runs: every row priced, or the reason why not; errors by source, coverage, verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from loadmaster.describe.precision import Precision
from loadmaster.describe.row import Described, MemoryKind, describe_row, read_rows
from loadmaster.errors import InvalidInput, LoadmasterError
from loadmaster.laws.flops import flops
from loadmaster.laws.interval import Interval, memory_interval, time_interval
from loadmaster.laws.memory import Peak, memory_peak
from loadmaster.laws.step import step_interval, time_terms

__all__ = ["Errors", "Scored", "exclusions", "score_files", "score_row", "summarise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One row of a table.

    Attributes:
        row_id, source: which row; reason: why it is not priced, else None.
        run: the row as values; memory: predicted bytes of what the row measured, in its kind.
        terms: the bytes of the rank that was measured; step_seconds: predicted.
        fits: whether the worst rank fits the device, None where the source leaves out too much to say;
            out_of_memory_probability: that it does not.
        excluded: why the row does not count, or None.
    """

    row_id: str
    source: str
    status: str
    reason: str | None = None
    run: Described | None = None
    memory: Interval | None = None
    terms: Mapping[str, int] | None = None
    step: Interval | None = None
    step_seconds: float | None = None
    mfu: float | None = None
    fits: bool | None = None
    out_of_memory_probability: float | None = None
    excluded: str | None = None

    @property
    def memory_error(self) -> float | None:
        """(predicted - measured) / measured, where both are known and the run finished."""
        if self.run is None or self.memory is None or not self.run.memory_bytes or self.run.failed:
            return None
        return self.memory.centre / self.run.memory_bytes - 1

    @property
    def time_error(self) -> float | None:
        """(predicted - measured) / measured seconds of a step."""
        if self.run is None or self.step_seconds is None or not self.run.step_seconds or self.run.failed:
            return None
        return self.step_seconds / self.run.step_seconds - 1

    def to_json(self) -> dict[str, Any]:
        """As ``validate --json`` prints a row."""
        devices = self.run.layout.world_size if self.run else None
        tokens = self.run.workload.tokens if self.run else None
        speed = tokens / self.step_seconds / devices if tokens and devices and self.step_seconds else None
        return {
            "row_id": self.row_id, "source": self.source, "priced": self.reason is None, "reason": self.reason,
            "complete": self.run.complete if self.run else None, "excluded": self.excluded,
            "memory_bytes": self.memory.centre if self.memory else None,
            "memory_low": self.memory.low if self.memory else None,
            "memory_high": self.memory.high if self.memory else None,
            "memory_error": self.memory_error, "time_error": self.time_error,
            "step_seconds": self.step_seconds, "step_low": self.step.low if self.step else None,
            "step_high": self.step.high if self.step else None,
            "tokens_per_second_per_device": speed, "mfu": self.mfu,
            "fits": self.fits, "out_of_memory_probability": self.out_of_memory_probability,
        }  # fmt: skip


def exclusions(path: str | PathLike[str]) -> dict[str, str]:
    """Row ids that do not count, with the reason, from ``exclusions.tsv`` in the folder of a table."""
    file = Path(path).parent / "exclusions.tsv"
    if not file.is_file() or file == Path(path):
        return {}
    return {row["row_id"]: row["reason"] for row in read_rows(file)}


def score_files(paths: Iterable[str | PathLike[str]]) -> Iterator[Scored]:
    """Every row of the tables, priced or not; a file of exclusions is not a table of runs.

    Raises:
        InvalidInput: a table cannot be read.
    """
    for path in paths:
        if Path(path).name == "exclusions.tsv":
            continue
        known = exclusions(path)
        for row in read_rows(path):
            yield score_row(row, source=Path(path).stem, excluded=known.get(row["row_id"]))


def score_row(row: Mapping[str, str], *, source: str, excluded: str | None = None) -> Scored:
    """Price one row."""
    status = row.get("status", "")
    try:
        run = describe_row(row)
    except LoadmasterError as error:
        said = f"{error.field} {error.rule}" if isinstance(error, InvalidInput) else str(error)
        return Scored(row_id=row["row_id"], source=source, status=status, reason=said, excluded=excluded)
    peak = memory_peak(run.model, run.cluster, run.workload, run.layout, run.stack, stage=run.stage)
    worst = peak if run.stage == "worst" or run.layout.pp == 1 else memory_peak(
        run.model, run.cluster, run.workload, run.layout, run.stack
    )  # fmt: skip
    needed = memory_interval(run.stack, worst.total)
    limit = run.cluster.memory_bytes
    runnable = _runnable(run)
    judged = set(run.missing) <= {"kind of memory"}  # a verdict needs all that moves memory
    seconds = float(sum(time_terms(run.model, run.cluster, run.workload, run.layout, run.stack).values()))
    return Scored(
        row_id=row["row_id"], source=source, status=status, run=run,
        memory=_interval(run, peak),
        terms={name: int(number) for name, number in peak.terms.items()},
        step_seconds=seconds,
        step=time_interval(step_interval(run.cluster, run.stack, run.workload, run.layout, seconds)),
        mfu=_mfu(run, seconds),
        fits=(bool(worst.total <= limit) and runnable) if judged else None,
        out_of_memory_probability=needed.probability_above(limit) if runnable else 1.0,
        excluded=excluded,
    )  # fmt: skip


def _runnable(run: Described) -> bool:
    """Whether the stack's own engine accepts the layout: nanotron wants pp - 1 micro-batches at least."""
    micro_batches = run.layout.num_micro_batches(run.workload)
    return run.stack.name != "nanotron" or micro_batches >= run.layout.pp - 1


_Z90 = 1.6449  # standard deviations either side that hold 90 % of a normal
_UNSAID_SIGMA = 0.15  # what one unsaid setting (kind of figure, version, varying length) adds to the spread


def _interval(run: Described, peak: Peak) -> Interval:
    """Around the bytes that the row measured; wider where the source leaves out what moves memory."""
    live = run.memory_kind is MemoryKind.ALLOCATED
    exact = memory_interval(run.stack, _measured(peak, run.memory_kind), allocated=live)
    if run.complete:
        return exact
    sigma = max(exact.sigma, _UNSAID_SIGMA)
    if any(name.startswith("recompute") for name in run.missing) and run.layout.recompute == "none":
        layout = replace(run.layout, recompute="full")
        full = memory_peak(run.model, run.cluster, run.workload, layout, run.stack, stage=run.stage)
        sigma += math.log(exact.centre / _measured(full, run.memory_kind)) / _Z90  # full recompute lies inside
    return Interval(centre=exact.centre, sigma=sigma)


def _measured(peak: Peak, kind: MemoryKind) -> float:
    """Bytes of the peak as a kind of measurement counts them."""
    match kind:
        case MemoryKind.ALLOCATED:
            return float(peak.allocated)
        case MemoryKind.RESERVED:
            return float(peak.reserved)
        case _:  # nvidia-smi, or unsaid: what a table without a kind was most likely read from
            return float(peak.total)


def _mfu(run: Described, seconds: float) -> float | None:
    precision = Precision.named(run.layout.precision)
    peak = run.cluster.device.peak(precision.matmul or precision.compute)
    if not peak or not seconds:
        return None
    return float(flops(run.model, run.workload, run.layout)["model"]) / seconds / run.layout.world_size / peak


# ---- summaries


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors of a group: absolute mean, median, 90th percentile; signed bias; all as fractions."""

    count: int
    mean: float
    median: float
    p90: float
    bias: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Errors | None:
        """None for no errors.

        >>> found = Errors.of([0.5, -0.5, 1.0])
        >>> found.count, round(found.mean, 3), found.median, found.p90, round(found.bias, 3)
        (3, 0.667, 0.5, 0.9, 0.333)
        """
        if not errors:
            return None
        sizes = sorted(abs(e) for e in errors)
        return cls(
            count=len(errors), mean=sum(sizes) / len(sizes), median=_quantile(sizes, 0.5), p90=_quantile(sizes, 0.9),
            bias=sum(errors) / len(errors),
        )  # fmt: skip

    def to_json(self) -> dict[str, float]:
        """Fields as numbers."""
        return {name: getattr(self, name) for name in ("count", "mean", "median", "p90", "bias")}


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return round(ordered[low] + (ordered[high] - ordered[low]) * (position - low), 12)


def summarise(rows: Sequence[Scored]) -> dict[str, Any]:
    """Errors by source and overall, interval coverage, verdicts on memory, and what could not be priced."""
    counted = [row for row in rows if row.excluded is None]
    sources = sorted({row.source for row in rows})
    elsewhere = [row for row in counted if row.source != "ultrascale_nanotron"]
    return {
        "rows": len(rows),
        "priced": sum(row.reason is None for row in rows),
        "excluded": {row.row_id: row.excluded for row in rows if row.excluded},
        "memory": {
            "by_source": {s: _memory([r for r in counted if r.source == s]) for s in sources},
            "outside_ultrascale": _memory(elsewhere),
            "coverage_90": _coverage(counted),
        },
        "time": {
            "by_source": {s: _time([r for r in counted if r.source == s]) for s in sources},
            "coverage_90": _time_coverage(counted),
        },
        "fits": {s: _verdicts([r for r in counted if r.source == s]) for s in ("all", *sources)
                 if s != "all"} | {"all": _verdicts(counted)},
        "reasons": _reasons(rows),
    }  # fmt: skip


def _memory(rows: Sequence[Scored]) -> dict[str, Any]:
    """Errors of complete rows, and of those that leave something unsaid."""
    found: dict[str, Any] = {}
    for name, complete in (("complete", True), ("incomplete", False)):
        errors = Errors.of(
            [e for r in rows if r.run and r.run.complete is complete and (e := r.memory_error) is not None]
        )
        found[name] = errors.to_json() if errors else None
    return found


def _time(rows: Sequence[Scored]) -> dict[str, Any] | None:
    errors = Errors.of([e for row in rows if (e := row.time_error) is not None])
    return errors.to_json() if errors else None


def _coverage(rows: Sequence[Scored]) -> float | None:
    """Share of complete measured rows inside the stated 90 % interval."""
    inside = [
        row.memory.low <= row.run.memory_bytes <= row.memory.high
        for row in rows
        if row.memory_error is not None and row.memory and row.run and row.run.complete and row.run.memory_bytes
    ]
    return sum(inside) / len(inside) if inside else None


def _time_coverage(rows: Sequence[Scored]) -> float | None:
    inside = [
        row.step.low <= row.run.step_seconds <= row.step.high
        for row in rows
        if row.time_error is not None and row.step and row.run and row.run.step_seconds
    ]
    return sum(inside) / len(inside) if inside else None


def _verdicts(rows: Sequence[Scored]) -> dict[str, Any]:
    """Ran and failed rows against fits and does not fit; `surely` counts failures given less than 1 %."""
    judged = [row for row in rows if row.fits is not None and row.run]
    ran = [row for row in judged if row.status == "ok"]
    failed = [row for row in judged if row.status.startswith(("oom", "fail"))]
    right = sum(row.fits is True for row in ran) + sum(row.fits is False for row in failed)
    return {
        "ran": len(ran), "ran_called_fitting": sum(row.fits is True for row in ran),
        "failed": len(failed), "failed_called_not_fitting": sum(row.fits is False for row in failed),
        "right": right / (len(ran) + len(failed)) if ran or failed else None,
        "failed_called_surely_fitting": sum((row.out_of_memory_probability or 0.0) < 0.01 for row in failed),
    }  # fmt: skip


def _reasons(rows: Sequence[Scored]) -> dict[str, int]:
    """How often each rule kept a row from being priced, most often first."""
    counts: dict[str, int] = {}
    for row in rows:
        if row.reason is not None:
            counts[row.reason] = counts.get(row.reason, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
