"""Bytes as a polynomial in batch and sequence, by how parallelism divides them: coefficients once, arrays many times.

``bytes = sum of c * batch^i * (seq_len / cp)^min(j, 1) * seq_len^(j - 1) / divisor``, where the divisor is 1, tp, or tp
under sequence parallelism only. Coefficients are exact integers of a block; a law evaluates them on whole columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loadmaster.describe.op import Split
from loadmaster.laws.numbers import Number, ceil_div, where

__all__ = ["Polynomial", "Shape"]

Key = tuple[int, int, str]  # batch power, sequence power, Split, "gathered" or "context/" and a Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a rank's micro-batch looks like: sequences, tokens a sequence, degrees (numbers or columns)."""

    batch: Number
    seq_len: Number
    cp: Number = 1
    tp: Number = 1
    sequence_parallel: Number = False

    @property
    def local_seq(self) -> Number:
        """Tokens of a sequence on this rank."""
        return ceil_div(self.seq_len, self.cp)

    @property
    def sequence_divisor(self) -> Number:
        """tp where sequence parallelism divides the stream, else 1."""
        return where(self.sequence_parallel, self.tp, 1)


@dataclass(frozen=True, slots=True)
class Polynomial:
    """Coefficients by (batch power, sequence power, division).

    >>> p = Polynomial.of([(1, 1, Split.TP, 8), (1, 1, Split.SEQUENCE, 2)])
    >>> p(Shape(batch=2, seq_len=16, tp=4)), p(Shape(batch=2, seq_len=16, tp=4, sequence_parallel=True))
    (128, 80)
    """

    terms: tuple[tuple[Key, int], ...] = ()

    @classmethod
    def of(cls, items: Iterable[tuple[int, int, str, int]]) -> Polynomial:
        """Sum of (batch power, sequence power, division, coefficient)."""
        sums: dict[Key, int] = {}
        for batch_power, seq_power, split, coefficient in items:
            key = (batch_power, seq_power, str(split))
            sums[key] = sums.get(key, 0) + coefficient
        return cls(tuple(sorted((k, c) for k, c in sums.items() if c)))

    def __add__(self, other: Polynomial) -> Polynomial:
        return Polynomial.of((*k, c) for k, c in (*self.terms, *other.terms))

    def __sub__(self, other: Polynomial) -> Polynomial:
        return Polynomial.of((*k, s * c) for s, p in ((1, self), (-1, other)) for k, c in p.terms)

    def scaled(self, factor: int) -> Polynomial:
        """Every coefficient times `factor`."""
        return Polynomial.of((*k, c * factor) for k, c in self.terms)

    def covers(self, other: Polynomial) -> bool:
        """No coefficient of `other` is larger: it can never be the greater of the two."""
        mine, theirs = dict(self.terms), dict(other.terms)
        return all(mine.get(k, 0) >= theirs.get(k, 0) for k in {*mine, *theirs})

    def __call__(self, shape: Shape) -> Number:
        """Bytes for `shape`; whole numbers, each tensor class rounded up."""
        total: Number = 0
        for (batch_power, seq_power, split), coefficient in self.terms:
            part: Number = coefficient
            if batch_power:
                part = part * shape.batch
            if seq_power:
                part = part * shape.local_seq
            if seq_power == 2:
                part = part * shape.seq_len
            if split.startswith("context/"):  # exists only where context parallelism divides the sequence
                part = part * (shape.cp > 1)
                split = split.removeprefix("context/")
            if split == Split.TP:
                part = ceil_div(part, shape.tp)
            elif split == Split.SEQUENCE:
                part = ceil_div(part, shape.sequence_divisor)
            elif split == "gathered":  # a copy that exists only where sequence parallelism divides the stream
                part = part * (shape.sequence_divisor > 1)
            total = total + part
        return total
