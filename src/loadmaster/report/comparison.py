"""Predicted against measured: the run's ledgers side by side, term by term."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from loadmaster.errors import InvalidInput
from loadmaster.ledger import Comparison, Ledger
from loadmaster.units import format_bytes, format_seconds

__all__ = ["compare_run", "comparison_table", "difference_json", "read_ledgers"]

TITLES = {
    "memory": "Memory, peak of the fullest rank",
    "traffic": "Traffic, sent by the busiest rank in a step",
    "time": "Time of a step, slowest rank",
}
# terms that a run cannot tell apart, by kind: (first name part or name of the predicted term) to the measured one
MERGED = {
    # everything alive at the peak beyond what stays between steps
    "memory": {
        "activations": "activations",
        "logits": "activations",
        "batch": "activations",
        "transient": "activations",
    },
    # both happen inside the backward
    "time": {"recompute": "backward", "accumulate": "backward"},
    "traffic": {},
}


def read_ledgers(body: Mapping[str, Any]) -> dict[str, Ledger]:
    """Ledgers by kind out of their JSON.

    Raises:
        InvalidInput: a ledger lacks its unit or terms.
    """
    if not isinstance(body, Mapping):
        raise InvalidInput("ledger", repr(body), "is no table of ledgers", "give the ledger.json that train wrote")
    found = {}
    for kind in TITLES:
        table = body.get(kind)
        if isinstance(table, Mapping):
            found[kind] = Ledger.read(f"ledger.{kind}", table.get("unit"), table.get("terms"))
        elif table is not None:
            raise InvalidInput(f"ledger.{kind}", repr(table), "is no ledger", "give the ledger.json that train wrote")
    return found


def compare_run(predicted: Mapping[str, Ledger], measured: Mapping[str, Ledger]) -> dict[str, Comparison]:
    """Comparisons by kind; where the measured side has one figure for several terms, the predicted are summed.

    >>> both = compare_run({"memory": Ledger("bytes", {"parameters": 8, "activations/mlp": 3, "logits": 2})},
    ...                    {"memory": Ledger("bytes", {"parameters": 8, "activations": 5})})
    >>> [(row.term, row.predicted, row.measured) for row in both["memory"].rows]
    [('parameters', 8, 8), ('activations', 5, 5)]
    """
    found = {}
    for kind in TITLES:
        if kind in predicted and kind in measured:
            found[kind] = _as_measured(kind, predicted[kind], measured[kind]).compare(measured[kind])
    return found


def _as_measured(kind: str, predicted: Ledger, measured: Ledger) -> Ledger:
    terms: dict[str, int | float] = {}
    for name, number in predicted.terms.items():
        merged = MERGED[kind].get(name.split("/", 1)[0], name)
        term = merged if merged in measured else name
        terms[term] = terms.get(term, 0) + number
    return Ledger(predicted.unit, terms)


def difference_json(comparisons: Mapping[str, Comparison]) -> dict[str, Any]:
    """``{kind: {"terms": {term: measured - predicted}, "total", "percent"}}``."""
    return {
        kind: {
            "unit": both.unit, "terms": {row.term: row.difference for row in both.rows},
            "total": both.total.difference, "percent": both.total.percent,
        }
        for kind, both in comparisons.items()
    }  # fmt: skip


def comparison_table(kind: str, both: Comparison) -> Table:
    """One kind's table, its total last."""
    show: Callable[[float], str] = format_bytes if both.unit == "bytes" else format_seconds
    table = Table(title=TITLES[kind], title_justify="left", show_footer=True)
    total = both.total
    columns = (
        ("term", "total"), ("predicted", show(total.predicted)), ("measured", show(total.measured)),
        ("difference", _signed(show, total.difference)), ("per cent", _percent(total.percent)),
    )  # fmt: skip
    for name, footer in columns:
        table.add_column(name, footer=footer, justify="left" if name == "term" else "right")
    for row in both.rows:
        if not row.predicted and not row.measured:
            continue
        exact = row.difference == 0
        table.add_row(
            row.term, show(row.predicted), show(row.measured),
            "equal" if exact else _signed(show, row.difference), "" if exact else _percent(row.percent),
        )  # fmt: skip
    return table


def _signed(show: Callable[[float], str], number: float) -> str:
    return f"+{show(number)}" if number > 0 else show(number)


def _percent(percent: float | None) -> str:
    return "not predicted" if percent is None else f"{percent:+.2f} %"
