"""Loadmaster: price, plan, run and verify a training step.

>>> import loadmaster as lm
>>> lm.Layout(dp_shard=8, zero=3).world_size
8
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

# public name -> module that holds it; imported on first use, so that planning imports no torch and a command
# imports no more than it needs
_PUBLIC = {
    "Model": "describe.model", "Block": "describe.model", "Op": "describe.op", "Weight": "describe.op",
    "DType": "describe.dtype", "Device": "describe.cluster", "Link": "describe.cluster", "Cluster": "describe.cluster",
    "Workload": "describe.workload", "Layout": "describe.layout", "Precision": "describe.precision",
    "Stack": "describe.stack", "Ledger": "ledger", "LoadmasterError": "errors", "InvalidInput": "errors",
    "lower": "program.lower", "Program": "program.lower",
    "price": "laws.cost", "Cost": "laws.cost",
    "plan": "planner.search", "Plan": "planner.search", "PlanResult": "planner.search", "Rejection": "planner.search",
    "measure": "probe.measure", "trace": "trace.api", "Timeline": "trace.timeline",
    "verify": "runtime.verify", "audit": "runtime.audit", "export": "export.api",
}  # fmt: skip
_PACKAGES = ("runtime", "units", "errors", "describe", "laws", "planner", "program", "report")

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(import_module(f"loadmaster.{_PUBLIC[name]}"), name)
        globals()[name] = value
        return value
    if name in _PACKAGES:
        return import_module(f"loadmaster.{name}")
    raise AttributeError(f"module 'loadmaster' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Importing the rooms `trace` and `export` must not hide the functions of the same name, which users call."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _PUBLIC and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
