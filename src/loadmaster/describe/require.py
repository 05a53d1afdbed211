"""What a field may hold: the checks by which every described value is legal from birth.

Each takes the field's name, for the message, and the value, and gives the value back in its type. They serve what
Python code passes and what a cluster or plan file holds alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from loadmaster.errors import InvalidInput

__all__ = ["flag", "given", "one_of", "real", "text", "whole"]

LARGEST = (1 << 63) - 1


def whole(field: str, value: object, *, least: int = 1, most: int = LARGEST) -> int:
    """A whole number between `least` and `most`; a truth value is none.

    >>> whole("layout.tp", 0)
    Traceback (most recent call last):
        ...
    loadmaster.errors.InvalidInput: layout.tp = 0: must be a whole number of at least 1; use 1 or more
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        rule = f"must be a whole number of at least {least}"
        raise InvalidInput(field, repr(value), rule, f"use {least} or more")
    if value > most:
        raise InvalidInput(field, value, f"must be a whole number of at most {most}", "give a smaller one")
    return value


def real(field: str, value: object, *, least: float = 0.0, above: float | None = None) -> float:
    """A finite number of at least `least`, or greater than `above`.

    >>> real("link.bandwidth", float("nan"), above=0)
    Traceback (most recent call last):
        ...
    loadmaster.errors.InvalidInput: link.bandwidth = nan: must be a finite number above 0; give such a number
    """
    rule = f"must be a finite number {f'of at least {least:g}' if above is None else f'above {above:g}'}"
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number) or number < least or (above is not None and number <= above):
        raise InvalidInput(field, repr(value), rule, "give such a number")
    return number


def flag(field: str, value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise InvalidInput(field, repr(value), "is not true or false", "write true or false")
    return value


def text(field: str, value: object) -> str:
    """A text."""
    if not isinstance(value, str):
        raise InvalidInput(field, repr(value), "is no text", "write it in quotes")
    return value


def one_of(field: str, value: object, allowed: Iterable[Any]) -> None:
    """One of the names or numbers that are known."""
    known = tuple(allowed)
    if not any(type(value) is type(choice) and value == choice for choice in known):
        raise InvalidInput(field, value, "is not known", f"use one of {', '.join(map(str, known))}")


def given(field: str, table: object, name: str, *, see: str) -> Any:
    """The entry `name` of a table read from a file, which has to be there."""
    if not isinstance(table, Mapping):
        raise InvalidInput(field, repr(table), "is not a table", see)
    if name not in table:
        raise InvalidInput(f"{field}.{name}", "missing", "is needed", see)
    return table[name]
