"""Units: bytes, seconds and FLOPs inside; GiB, ms and TFLOP/s only for reading and printing.

A multiply-add is 2 FLOPs. KiB, MiB, GiB are powers of 1024; kB, MB, GB powers of 1000.
"""

from __future__ import annotations

import re
from decimal import Decimal

from loadmaster.errors import InvalidInput

__all__ = ["GIB", "KIB", "MIB", "TIB", "format_bytes", "format_count", "format_seconds", "parse_count"]

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_SUFFIXES = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "ki": KIB, "mi": MIB, "gi": GIB, "ti": TIB,
}  # fmt: skip
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d{1,6})?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)
_LARGEST = 1 << 63


def parse_count(text: str | int, *, field: str = "value") -> int:
    """Whole number from ``"4Mi"``, ``"25 MiB"``, ``"8GB"``, ``"1e9"`` or an int; a fraction of a unit is cut to whole.

    Raises:
        InvalidInput: the text is no number, not a whole one, or too large to be meant.

    >>> parse_count("4Mi"), parse_count("14.56GiB"), parse_count("8k"), parse_count(7)
    (4194304, 15633680957, 8000, 7)
    """
    if isinstance(text, int):
        return text
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise InvalidInput(field, repr(text), "is no count: a number with an optional unit", "write e.g. 4Mi or 25MiB")
    number = Decimal(match[1]) * _SUFFIXES[(match[2] or "").lower()]  # exact, where a float would round
    if number >= _LARGEST:
        raise InvalidInput(field, repr(text[:40]), "is larger than 2^63", "give a smaller number")
    if number != int(number) and not match[2]:
        raise InvalidInput(field, repr(text), "is not a whole number", "use a smaller unit")
    return int(number)


def format_bytes(count: float) -> str:
    """Bytes for people.

    >>> format_bytes(1536), format_bytes(16 * GIB), format_bytes(-3 * MIB), format_bytes(12)
    ('1.50 KiB', '16.00 GiB', '-3.00 MiB', '12 B')
    """
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Seconds for people.

    >>> format_seconds(0.0042), format_seconds(90), format_seconds(3e-6), format_seconds(0)
    ('4.20 ms', '90.00 s', '3.00 us', '0 s')
    """
    if seconds == 0:
        return "0 s"
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= unit:
            return f"{seconds / unit:.2f} {name}"
    return f"{seconds / 1e-9:.2f} ns"


def format_count(count: float) -> str:
    """A count for people, in powers of 1000.

    >>> format_count(8030261248), format_count(512), format_count(4.5e14)
    ('8.03 G', '512', '450.00 T')
    """
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count:.0f}"
