"""Floor 3: the same tables executed on torch.distributed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "build": "engine", "Engine": "engine", "StepResult": "engine", "OptimizerConfig": "optimizer",
    "StateShard": "state", "RankFailure": "agreement",
}  # fmt: skip

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"loadmaster.runtime.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'loadmaster.runtime' has no attribute {name!r}")
