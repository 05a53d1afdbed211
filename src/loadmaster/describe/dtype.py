"""Floating-point formats from their bit split alone: range, spacing, rounding; no NumPy, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loadmaster.errors import InvalidInput

__all__ = ["DTYPES", "DType"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """A binary floating-point format: sign, `exponent_bits`, `mantissa_bits`.

    With bias b = 2^(e-1) - 1 and m mantissa bits: a normal number is 2^E (1 + k / 2^m), k < 2^m, 1 - b <= E <= E_max;
    a subnormal one 2^(1-b) k / 2^m. IEEE formats give the highest exponent to infinity and NaN (E_max = b);
    `finite` ones (fp8 e4m3fn) use it for numbers and keep only its last pattern for NaN.

    Attributes:
        name: as in layouts (``bf16``); bits: of storage (tf32 is kept in 32).
        exponent_bits, mantissa_bits: without the implicit leading one.
        finite: no infinity; what exceeds the range becomes the largest number, as PyTorch converts it.

    Source: IEEE 754-2019 section 3; fp8: Micikevicius et al., 2022, arXiv 2209.05433, table 1.

    >>> fp16, bf16 = DType.named("fp16"), DType.named("bf16")
    >>> fp16.max, fp16.smallest_normal, fp16.smallest_subnormal
    (65504.0, 6.103515625e-05, 5.960464477539063e-08)
    >>> bf16.ulp(1.0), bf16.round(66246.39), fp16.round(66246.39)
    (0.0078125, 66048.0, inf)
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    finite: bool = False

    def __post_init__(self) -> None:
        if self.exponent_bits < 2 or self.mantissa_bits < 1 or self.bits < 1 + self.exponent_bits + self.mantissa_bits:
            raise InvalidInput(
                f"dtype {self.name}", (self.bits, self.exponent_bits, self.mantissa_bits),
                "needs a sign, at least 2 exponent and 1 mantissa bits", "correct the bit split",
            )  # fmt: skip

    @classmethod
    def named(cls, name: str) -> DType:
        """A known format by name.

        Raises:
            InvalidInput: the name is none of `DTYPES`.
        """
        if name not in DTYPES:
            raise InvalidInput("dtype", name, "is no known format", f"use one of {', '.join(DTYPES)}")
        return DTYPES[name]

    @property
    def bytes(self) -> int:
        """Bytes of storage."""
        return self.bits // 8

    @property
    def bias(self) -> int:
        """Exponent bias, 2^(e-1) - 1."""
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite number."""
        return self.bias + 1 if self.finite else self.bias

    @property
    def max(self) -> float:
        """Largest finite number: 2^E_max (2 - 2^-m), one step less where the last pattern is NaN."""
        steps = 2 if self.finite else 1
        return math.ldexp(2.0 - math.ldexp(steps, -self.mantissa_bits), self.max_exponent)

    @property
    def smallest_normal(self) -> float:
        """2^(1 - bias): below it precision is lost bit by bit."""
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """2^(1 - bias - m): half of it and less rounds to zero."""
        return math.ldexp(1.0, 1 - self.bias - self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        """Spacing above 1.0: 2^-m."""
        return math.ldexp(1.0, -self.mantissa_bits)

    def ulp(self, x: float) -> float:
        """Distance from |x| to the next larger number of the same binade.

        ulp(x) = 2^(max(floor(log2 |x|), 1 - bias) - m)

        An update of less than half of it (a quarter, downwards from a power of two) leaves a weight x as it is.

        >>> DType.named("bf16").ulp(1.0) / 4, DType.named("bf16").ulp(0.5) / 4
        (0.001953125, 0.0009765625)
        """
        if x == 0 or math.isnan(x) or math.isinf(x):
            return self.smallest_subnormal if x == 0 else math.nan
        exponent = max(math.frexp(x)[1] - 1, 1 - self.bias)
        return math.ldexp(1.0, exponent - self.mantissa_bits)

    def round(self, x: float) -> float:
        """The nearest number, ties to the even one; beyond the range infinity (the largest in a finite format).

        >>> DType.named("bf16").round(15962.0), DType.named("fp16").round(1e-8), DType.named("fp8_e4m3").round(480.0)
        (15936.0, 0.0, 448.0)
        """
        if x == 0 or math.isnan(x):
            return x
        if self._exceeds(x):
            return math.copysign(self.max if self.finite else math.inf, x)
        return math.copysign(self._nearest(x), x)

    def _nearest(self, x: float) -> float:
        step = self.ulp(x)
        return round(x / step) * step  # Python rounds ties to even; powers of two divide exactly

    def _exceeds(self, x: float) -> bool:
        return math.isinf(x) or abs(self._nearest(x)) > self.max

    def overflows(self, x: float) -> bool:
        """x is finite and cannot be held."""
        return math.isfinite(x) and x != 0 and self._exceeds(x)

    def underflows(self, x: float) -> bool:
        """x is not zero and becomes zero."""
        return x != 0 and self.round(x) == 0

    def num_distinct(self, count: int) -> int:
        """How many of the whole numbers 0 .. count - 1 can be told apart, infinity not counted.

        Case of rotary positions kept in the model's dtype: every binade [2^k, 2^(k+1)) holds at most 2^m of them.

        >>> [DType.named(d).num_distinct(4096) for d in ("bf16", "fp16")]
        [769, 3073]
        """
        values = (self.round(float(i)) for i in self._turning_points(count))
        return len({v for v in values if math.isfinite(v)})

    def _turning_points(self, count: int) -> list[int]:
        """Whole numbers that include one of every rounded value: all while exact, then each half step."""
        exact = min(count, 2 ** (self.mantissa_bits + 1))
        points = list(range(exact))
        start = exact
        while start < count:
            half = max(1, int(self.ulp(float(start)) / 2))
            stop = min(count, 2 * start)
            points += range(start, stop, half)
            start *= 2
        return [*points, count - 1] if count else points


DTYPES = {
    d.name: d
    for d in (
        DType(name="fp64", bits=64, exponent_bits=11, mantissa_bits=52),
        DType(name="fp32", bits=32, exponent_bits=8, mantissa_bits=23),
        DType(name="tf32", bits=32, exponent_bits=8, mantissa_bits=10),
        DType(name="bf16", bits=16, exponent_bits=8, mantissa_bits=7),
        DType(name="fp16", bits=16, exponent_bits=5, mantissa_bits=10),
        DType(name="fp8_e4m3", bits=8, exponent_bits=4, mantissa_bits=3, finite=True),
        DType(name="fp8_e5m2", bits=8, exponent_bits=5, mantissa_bits=2),
    )
}
