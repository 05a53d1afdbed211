"""Reads the fields of a config: each getter checks its type and range and refuses in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from loadmaster.errors import InvalidInput

__all__ = ["Fields"]

MAX_COUNT = 1 << 31
_REQUIRED: Any = object()


class Fields:
    """A config's keys under their usual names.

    Args:
        raw: the JSON object.
        aliases: usual name to other spellings that configs in the wild use (``hidden_size``: ``n_embd``).
        where: prefix of field names in errors.

    >>> fields = Fields({"n_embd": 768, "bias": None}, aliases={"hidden_size": ("n_embd",)})
    >>> fields.count("hidden_size"), fields.flag("bias", True), fields.count("num_layers", 12)
    (768, True, 12)
    >>> fields.count("vocab_size")
    Traceback (most recent call last):
    loadmaster.errors.InvalidInput: config.vocab_size = missing: is needed to build this model; add vocab_size to ...
    """

    def __init__(
        self, raw: Mapping[str, Any], *, aliases: Mapping[str, tuple[str, ...]] | None = None, where: str = "config"
    ) -> None:
        self.raw, self.aliases, self.where = raw, aliases or {}, where

    def spelled(self, name: str) -> str:
        """The spelling of `name` that this config uses."""
        return next((s for s in (name, *self.aliases.get(name, ())) if self.raw.get(s) is not None), name)

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it stands; `default` where absent or null."""
        value = self.raw.get(self.spelled(name))
        return default if value is None else value

    def has(self, name: str) -> bool:
        """Present and not null."""
        return self.raw.get(self.spelled(name)) is not None

    def count(self, name: str, default: Any = _REQUIRED, *, minimum: int = 1, maximum: int = MAX_COUNT) -> int:
        """A whole number of at least `minimum`."""
        value = self.get(name)
        if value is None:
            if default is _REQUIRED:
                self.refuse(name, "missing", "is needed to build this model", f"add {name} to the config")
            return int(default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(name, repr(value), "must be a whole number", "write it as a JSON integer")
        if not minimum <= value <= maximum:
            self.refuse(name, value, f"must lie between {minimum} and {maximum}", "check the config against its source")
        return int(value)

    def optional_count(self, name: str, *, minimum: int = 1) -> int | None:
        """As `count`; None where absent or null."""
        return self.count(name, minimum=minimum) if self.has(name) else None

    def layers(self, name: str = "num_hidden_layers", default: Any = _REQUIRED) -> int:
        """A number of layers."""
        return self.count(name, default, maximum=1 << 14)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, repr(value), "must be true or false", "write true or false")
        return bool(value)

    def rate(self, name: str, default: float = 0.0) -> float:
        """A dropout rate."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            self.refuse(name, repr(value), "must be a rate between 0 and 1", "use 0.0 to switch dropout off")
        return float(value)

    def number(self, name: str, default: float | None = None) -> float | None:
        """A real number."""
        value = self.get(name, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value)):
            self.refuse(name, repr(value), "must be a finite number", "write a JSON number")
        return None if value is None else float(value)

    def text(self, name: str, default: str) -> str:
        """A word."""
        value = self.get(name, default)
        if not isinstance(value, str):
            self.refuse(name, repr(value), "must be a text", f'write e.g. "{default}"')
        return str(value)

    def choice(self, name: str, default: str, allowed: tuple[str, ...]) -> str:
        """One of a few words."""
        value = self.text(name, default)
        if value not in allowed:
            self.refuse(name, repr(value), "is not known", f"use one of {', '.join(allowed)}")
        return value

    def mapping(self, name: str) -> Fields:
        """A nested object (empty where absent)."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            self.refuse(name, repr(value), "must be an object", "write {...}")
        return Fields(value, where=f"{self.where}.{name}")

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers, or None."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            self.refuse(name, value, "must be a list of whole numbers", "write e.g. [0, 1]")
        return tuple(value)

    def words(self, name: str, length: int, allowed: tuple[str, ...]) -> tuple[str, ...] | None:
        """A list of `length` words, or None."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) != length:
            self.refuse(name, value, f"must list one entry for each of {length} layers", "shorten or complete the list")
        for word in value:
            if word not in allowed:
                self.refuse(name, repr(word), "is not a kind known here", f"use one of {', '.join(allowed)}")
        return tuple(value)

    def divides(self, part: str, parts: int, whole: str, total: int) -> int:
        """total / parts, which must be whole."""
        if total % parts:
            self.refuse(part, parts, f"must divide {whole} = {total}", _nearest(parts, total))
        return total // parts

    def refuse(self, name: str, value: object, rule: str, way_out: str) -> None:
        """Raise `InvalidInput` for field `name`."""
        raise InvalidInput(f"{self.where}.{self.spelled(name)}", value, rule, way_out)


def _nearest(parts: int, total: int) -> str:
    divisors = [d for d in range(1, min(total, 4096) + 1) if total % d == 0]
    near = sorted(sorted(divisors, key=lambda d: abs(d - parts))[:3])
    return f"use e.g. {', '.join(map(str, near))}"
