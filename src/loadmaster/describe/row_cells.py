"""Cells of a row: plain numbers, or a refusal that names the column."""

from __future__ import annotations

import math
from collections.abc import Mapping

from loadmaster.errors import InvalidInput

__all__ = ["Row", "count", "number"]

Row = Mapping[str, str]


def number(row: Row, field: str, scale: float = 1.0) -> float | None:
    """The cell times `scale`; None where it is empty.

    >>> number({"mem_gib": "1.5"}, "mem_gib", 2), number({}, "mem_gib")
    (3.0, None)
    """
    text = row.get(field, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise InvalidInput(f"row.{field}", text, "is no number", "write a plain number, or leave the cell empty")
    return value * scale


def count(row: Row, field: str, default: int | None = None, *, least: int = 1) -> int:
    """The cell as a whole number of at least `least`; `default` where it is empty.

    >>> count({"tp": "8"}, "tp"), count({"cp": ""}, "cp", 1)
    (8, 1)
    """
    value = number(row, field)
    if value is None:
        if default is None:
            raise InvalidInput(f"row.{field}", "", "is not stated", "give the run's value")
        return default
    if value != int(value) or value < least:
        raise InvalidInput(f"row.{field}", row[field], f"is no whole number of at least {least}", "check the cell")
    return int(value)
