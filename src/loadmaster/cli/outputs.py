"""Refusing an output path before the work, not after it."""

from __future__ import annotations

import os
from pathlib import Path

from loadmaster.errors import InvalidInput

__all__ = ["check_writable", "check_writable_folder"]


def check_writable(path: str) -> None:
    """A file can be written at `path`.

    Raises:
        InvalidInput: its folder is missing or closed, or a folder stands there.
    """
    target = Path(path)
    if target.is_dir():
        raise InvalidInput("output", path, "is a folder", "name a file")
    if not target.parent.is_dir():
        raise InvalidInput("output", path, f"{target.parent} is no folder", "make it, or name another")
    if not os.access(target.parent, os.W_OK) or (target.exists() and not os.access(target, os.W_OK)):
        raise InvalidInput("output", path, "cannot be written", "give a path you may write to")


def check_writable_folder(path: str) -> None:
    """A folder exists, or can be made, at `path` and be written to; nothing is made yet.

    Raises:
        InvalidInput: a file stands there, or the nearest folder above is closed.
    """
    target = Path(path).absolute()
    above = next(p for p in (target, *target.parents) if p.exists())
    if not above.is_dir():
        raise InvalidInput("out", path, f"{above} is a file", "name a folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InvalidInput("out", path, f"{above} cannot be written", "give a folder you may write to")
