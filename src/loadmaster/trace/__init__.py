"""Floor 3: any module run once on ghosts, every storage followed.

The package is callable, ``loadmaster.trace(module, inputs)``: it carries the name of the one thing it does.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """The package, which can be called."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """`loadmaster.trace.api.trace`."""
        from loadmaster.trace.api import trace

        return trace(*args, **options)


sys.modules[__name__].__class__ = _Room
