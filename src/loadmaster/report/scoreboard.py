"""The scoreboard of measured runs: tables for the terminal, and the page of the docs, from one set of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from loadmaster.report.validation import Scored

__all__ = ["markdown", "print_scoreboard"]

Rows = list[tuple[str, ...]]
_MEMORY = ("source", "rows", "mean", "median", "p90", "bias", "rows not fully stated", "their median")
_TIME = ("source", "rows", "mean", "median", "p90", "bias")
_FITS = ("source", "ran", "called fitting", "failed", "called not fitting", "right", "failed, called surely fitting")


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _memory_rows(summary: Mapping[str, Any]) -> Rows:
    table: Rows = []
    groups = {
        **summary["memory"]["by_source"],
        "all outside ultrascale_nanotron": summary["memory"]["outside_ultrascale"],
    }
    for source, found in groups.items():
        full, part = found["complete"], found["incomplete"]
        if full or part:
            figures = [_percent(full[k]) if full else "" for k in ("mean", "median", "p90", "bias")]
            table.append((source, str(full["count"] if full else 0), *figures,
                          str(part["count"]) if part else "", _percent(part["median"]) if part else ""))  # fmt: skip
    return table


def _time_rows(summary: Mapping[str, Any]) -> Rows:
    return [
        (source, str(found["count"]), *(_percent(found[k]) for k in ("mean", "median", "p90", "bias")))
        for source, found in summary["time"]["by_source"].items()
        if found
    ]


def _fits_rows(summary: Mapping[str, Any]) -> Rows:
    names = ("ran", "ran_called_fitting", "failed", "failed_called_not_fitting")
    return [
        (source, *(str(found[k]) for k in names), _percent(found["right"]), str(found["failed_called_surely_fitting"]))
        for source, found in summary["fits"].items()
        if found["failed"] or source == "all"
    ]


def _share_rows(rows: Sequence[Scored]) -> tuple[tuple[str, ...], Rows]:
    """What the predicted bytes consist of, by source."""
    names = (
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "logits",
        "transient",
        "buffers",
        "context",
        "allocator",
    )
    table: Rows = []
    for source in sorted({row.source for row in rows}):
        mine = [row.terms for row in rows if row.source == source and row.terms and row.memory_error is not None]
        if mine:
            sums = dict.fromkeys(names, 0.0)
            for terms in mine:
                total = sum(terms.values())
                for term, number in terms.items():
                    head = term.split("/", 1)[0]
                    sums[head] = sums.get(head, 0.0) + number / total
            table.append((source, *(_percent(sums[n] / len(mine)) for n in names)))
    return ("source", *names), table


def _worst_rows(rows: Sequence[Scored], attribute: str, limit: int) -> Rows:
    scored = [(abs(e), row, e) for row in rows if (e := getattr(row, attribute)) is not None and row.excluded is None
              and row.run and (row.run.complete or attribute == "time_error")]  # fmt: skip
    scored.sort(key=lambda item: -item[0])
    return [
        (row.row_id, row.run.model.name, row.run.stack.name, row.run.layout.describe(), _percent(error))
        for _, row, error in scored[:limit]
        if row.run
    ]


def print_scoreboard(rows: Sequence[Scored], summary: Mapping[str, Any], *, worst: int = 10) -> None:
    """Print the tables."""
    out = Console(emoji=False)
    out.print(f"{summary['rows']:,} rows, {summary['priced']:,} priced, {len(summary['excluded'])} excluded")
    names, shares = _share_rows(rows)
    reasons = [(str(n), reason) for reason, n in summary["reasons"].items()][:worst]
    for title, head, body in (
        ("Memory: (predicted - measured) / measured", _MEMORY, _memory_rows(summary)),
        ("Step time: (predicted - measured) / measured", _TIME, _time_rows(summary)),
        ("Fits or not", _FITS, _fits_rows(summary)),
        ("Shares of the predicted bytes", names, shares),
        ("Worst in memory", ("row", "model", "stack", "layout", "error"), _worst_rows(rows, "memory_error", worst)),
        ("Worst in time", ("row", "model", "stack", "layout", "error"), _worst_rows(rows, "time_error", worst)),
        (
            "Not priced",
            ("rows", "reason"),
            reasons,
        ),
    ):
        if body:
            table = Table(title=title, title_justify="left")
            for name in head:
                table.add_column(name, overflow="fold")
            for line in body:
                table.add_row(*line)
            out.print(table)
    out.print(
        f"90 % intervals hold {_percent(summary['memory']['coverage_90'])} of the measured memory, "
        f"{_percent(summary['time']['coverage_90'])} of the measured step times"
    )


def _table(head: Sequence[str], body: Rows) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(line) + " |" for line in body), ""]


def markdown(rows: Sequence[Scored], summary: Mapping[str, Any], *, command: str) -> str:
    """The page ``docs/scoreboard.md``."""
    names, shares = _share_rows(rows)
    reasons: Rows = [(str(n), reason) for reason, n in summary["reasons"].items()]
    excluded: Rows = [(row_id, reason) for row_id, reason in summary["excluded"].items()]
    lines = [
        "# Scoreboard: the laws on published runs", "",
        f"Written by `{command}`; do not edit. {summary['rows']} rows, {summary['priced']} of them priced, with one "
        "set of constants a stack and a device and nothing fitted a row or a model. Constants of allocators were "
        "fitted on these same rows, nanotron's with a table by pp and tp: "
        "[held out](validation.md#what-was-fitted) it does worse.", "",
        "## Memory", "",
        "(predicted - measured) / measured, in the kind the source measured: allocated, reserved, or the whole device. "
        "Rows whose source leaves out something that moves memory (recompute, the kind of figure, the micro-batch, "
        "...) stand apart.", "",
        *_table(_MEMORY, _memory_rows(summary)),
        f"The stated 90 % intervals hold {_percent(summary['memory']['coverage_90'])} of the complete rows.", "",
        "What the predicted bytes consist of, on average:", "", *_table(names, shares),
        "## Fits or not", "", *_table(_FITS, _fits_rows(summary)),
        "## Step time", "", *_table(_TIME, _time_rows(summary)),
        f"The stated 90 % intervals hold {_percent(summary['time']['coverage_90'])} of the rows.", "",
        "## Worst rows in memory", "",
        *_table(("row", "model", "stack", "layout", "error"), _worst_rows(rows, "memory_error", 20)),
        "## Excluded rows", "", *_table(("row", "reason"), excluded),
        "## Rows not priced", "", *_table(("rows", "reason"), reasons),
    ]  # fmt: skip
    return "\n".join(lines)
