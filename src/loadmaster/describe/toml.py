"""TOML out, the half that the standard library lacks: plain tables to text, and text to disk whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadmaster.errors import InvalidInput

__all__ = ["dumps", "write_atomic"]


def dumps(table: Mapping[str, Any]) -> str:
    r"""TOML text of nested mappings of numbers, strings, booleans and lists; None is left out.

    >>> print(dumps({"a": 1, "t": {"x": 0.5, "s": 'say "hi"', "none": None}}))
    a = 1
    <BLANKLINE>
    [t]
    x = 0.5
    s = "say \"hi\""
    <BLANKLINE>
    """
    return "\n".join(_lines(table, ())) + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    here = [f"{_key(k)} = {_value(v)}" for k, v in table.items() if v is not None and not isinstance(v, Mapping)]
    lines = [*([f"[{'.'.join(map(_key, path))}]"] if path and here else []), *here]
    for name, inner in table.items():
        if isinstance(inner, Mapping):
            below = _lines(inner, (*path, str(name)))
            lines += ["", *below] if lines and below else below
    return lines


def _key(name: object) -> str:
    text = str(name)
    return text if text and all(c.isalnum() or c in "_-" for c in text) and text.isascii() else json.dumps(text)


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(value) if value == value and abs(value) != float("inf") else str(value)
        case str() if "\n" in value and "'''" not in value:
            return f"'''\n{value}'''"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return "[" + ", ".join(_value(v) for v in value) + "]"
        case _:
            return json.dumps(str(value))


def write_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` beside `path` and move it there: a reader sees the old file or the new one.

    Raises:
        InvalidInput: the folder is missing or not writable; nothing is left behind.
    """
    target = Path(path)
    try:
        handle, beside = tempfile.mkstemp(dir=target.parent or Path(), prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(beside).chmod(0o644)
            os.replace(beside, target)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InvalidInput(
            "output", str(path), f"cannot be written ({error.strerror})", "give a path in a folder you may write to"
        ) from None
