"""The one ledger type: an ordered, flat mapping from slash-separated term names to numbers.

Predicted and measured are both ledgers with the same names, so that setting one against the other is a
subtraction. Integers stay integers; nothing is rounded before it is printed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from loadmaster.errors import InvalidInput

__all__ = ["Comparison", "Difference", "Ledger"]

Number = int | float
UNITS = ("bytes", "seconds", "FLOPs", "messages")


@dataclass(frozen=True, slots=True, init=False)
class Ledger:
    """Terms of one quantity.

    Attributes:
        unit: ``bytes``, ``seconds``, ``FLOPs`` or ``messages``.
        terms: term name to number, in the order they are printed.

    >>> memory = Ledger("bytes", {"parameters": 10, "optimizer/exp_avg": 4, "optimizer/exp_avg_sq": 4})
    >>> memory.total, memory.under("optimizer").total, memory["parameters"]
    (18, 8, 10)
    """

    unit: str
    terms: Mapping[str, Number]

    def __init__(self, unit: str, terms: Mapping[str, Number]) -> None:
        if unit not in UNITS:
            raise InvalidInput("ledger.unit", unit, "is not a unit of this product", f"use one of {', '.join(UNITS)}")
        for name in terms:
            if not name or name != name.strip("/"):
                raise InvalidInput("ledger.terms", repr(name), "is not a term name", "write e.g. optimizer/exp_avg")
        object.__setattr__(self, "unit", unit)
        object.__setattr__(self, "terms", MappingProxyType(dict(terms)))

    @classmethod
    def read(cls, field: str, unit: object, terms: object) -> Ledger:
        """A ledger out of a file, whose terms have to be finite numbers.

        Raises:
            InvalidInput: the field, and the term, that are not.
        """
        if not isinstance(terms, Mapping):
            raise InvalidInput(f"{field}.terms", repr(terms), "is no table of numbers", "write the file again")
        for name, number in terms.items():
            if not isinstance(number, int | float) or isinstance(number, bool) or not math.isfinite(number):
                raise InvalidInput(f"{field}.terms.{name}", repr(number), "is no number", "write the file again")
        return cls(str(unit), terms)

    def __reduce__(self) -> tuple[type[Ledger], tuple[str, dict[str, Number]]]:
        return Ledger, (self.unit, dict(self.terms))

    def __getitem__(self, name: str) -> Number:
        return self.terms.get(name, 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.terms)

    def __len__(self) -> int:
        return len(self.terms)

    @property
    def total(self) -> Number:
        """Sum of every term (the sum, never the largest part)."""
        return sum(self.terms.values())

    def under(self, prefix: str) -> Ledger:
        """The terms named `prefix` or below it."""
        return Ledger(self.unit, {k: v for k, v in self.terms.items() if k == prefix or k.startswith(prefix + "/")})

    def top(self) -> Ledger:
        """Terms summed by their first name part: ``optimizer/master`` and ``optimizer/exp_avg`` under ``optimizer``."""
        sums: dict[str, Number] = {}
        for name, number in self.terms.items():
            head = name.split("/", 1)[0]
            sums[head] = sums.get(head, 0) + number
        return Ledger(self.unit, sums)

    def __add__(self, other: Ledger) -> Ledger:
        assert self.unit == other.unit, (self.unit, other.unit)
        names = list(self.terms) + [n for n in other.terms if n not in self.terms]
        return Ledger(self.unit, {n: self[n] + other[n] for n in names})

    def map(self, function: Callable[[Number], Number]) -> Ledger:
        """The same terms, each number passed through `function`."""
        return Ledger(self.unit, {k: function(v) for k, v in self.terms.items()})

    def to_json(self) -> dict[str, object]:
        """``{"unit", "terms", "total"}`` with unrounded numbers."""
        return {"unit": self.unit, "terms": dict(self.terms), "total": self.total}

    def compare(self, measured: Ledger) -> Comparison:
        """Set this prediction against `measured`, term by term.

        >>> rows = Ledger("bytes", {"a": 10, "b": 5}).compare(Ledger("bytes", {"a": 10, "b": 4, "c": 1})).rows
        >>> [(r.term, r.difference, r.percent) for r in rows]
        [('a', 0, 0.0), ('b', -1, -20.0), ('c', 1, None)]
        """
        if self.unit != measured.unit:
            raise InvalidInput(
                "ledger.unit", measured.unit, f"cannot be compared with {self.unit}", "compare like with like"
            )
        names = list(self.terms) + [n for n in measured.terms if n not in self.terms]
        return Comparison(self.unit, tuple(Difference(n, self[n], measured[n]) for n in names))


@dataclass(frozen=True, slots=True)
class Difference:
    """One term: what was predicted and what was measured."""

    term: str
    predicted: Number
    measured: Number

    @property
    def difference(self) -> Number:
        """Measured minus predicted."""
        return self.measured - self.predicted

    @property
    def percent(self) -> float | None:
        """Difference in per cent of the prediction; None where nothing was predicted."""
        if self.predicted == 0:
            return 0.0 if self.measured == 0 else None
        return 100.0 * self.difference / self.predicted


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows of predicted against measured; `total` is their sum."""

    unit: str
    rows: tuple[Difference, ...]

    @property
    def total(self) -> Difference:
        """The sum over all rows."""
        return Difference("total", sum(r.predicted for r in self.rows), sum(r.measured for r in self.rows))
