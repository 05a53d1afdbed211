"""A plan handed to another framework: its configuration files and the script that starts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from os import PathLike

from loadmaster.describe.plan_file import PlanFile
from loadmaster.errors import InvalidInput

__all__ = ["TARGETS", "Exported", "export"]

# name on the command line -> module below loadmaster.export that holds `files(plan)`
TARGETS = {
    "torchtitan": "torchtitan",
    "megatron": "megatron",
    "deepspeed": "deepspeed",
    "accelerate-fsdp": "accelerate",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export writes.

    Attributes:
        files: name to text; notes: what the target cannot say, or what a reader must fill in.
    """

    files: Mapping[str, str]
    notes: tuple[str, ...] = ()


def export(plan: PlanFile | str | PathLike[str], to: str) -> Exported:
    """The files that make `to` run the layout of a plan, read or not.

    Raises:
        InvalidInput: unknown target, or a layout that it cannot run.
    """
    if to not in TARGETS:
        raise InvalidInput("--to", to, "is no target", f"use one of {', '.join(TARGETS)}")
    files: Callable[[PlanFile], Exported] = import_module(f"loadmaster.export.{TARGETS[to]}").files
    return files(plan if isinstance(plan, PlanFile) else PlanFile.load(plan))


def require(plan: PlanFile, target: str, fields: Mapping[str, object]) -> None:
    """Refuse a layout whose `fields` differ from what the target can run.

    Raises:
        InvalidInput: naming the first field that differs.
    """
    stack = target.split()[0].lower().removesuffix("-lm")
    for name, wanted in fields.items():
        value = getattr(plan.layout, name)
        allowed = wanted if isinstance(wanted, tuple) else (wanted,)
        if value not in allowed:
            raise InvalidInput(
                f"layout.{name}", value, f"is nothing that {target} can run",
                f"plan for it with --stack {stack}, or use {' or '.join(map(str, allowed))}",
            )  # fmt: skip
