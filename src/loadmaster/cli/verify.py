"""``loadmaster verify``: does my layout compute the same as one process?"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from loadmaster.describe.layout import Layout
    from loadmaster.describe.plan_file import PlanFile
    from loadmaster.runtime.verify import Verification


def command(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="Plan file, as loadmaster plan -o writes it.")],
    layout: Annotated[str | None, typer.Option(help="Change fields of the plan's layout: dp_shard=2,zero=3.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare.")] = 2,
    seq: Annotated[int | None, typer.Option(help="Tokens a sequence; else the plan's, at most 64.")] = None,
    layers: Annotated[int | None, typer.Option(help="Verify a model of this many layers: layers are alike.")] = None,
    as_planned: Annotated[bool, typer.Option(help="Keep the plan's precision; else fp32, where it is sharp.")] = False,
    tolerance: Annotated[float | None, typer.Option(help="Relative difference of gradients allowed.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights and tokens.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Run the layout on local ranks beside one plain process and compare every step; exit 1 if they differ."""
    from importlib.util import find_spec

    from loadmaster.describe.plan_file import PlanFile
    from loadmaster.errors import MissingDependency

    if find_spec("torch") is None:
        raise MissingDependency("verify", "torch", "runtime")
    from loadmaster.runtime.verify import verify

    read = PlanFile.load(plan)
    found = verify(
        read, layout=_changed(read, layout), steps=steps, seq_len=seq, layers=layers, as_planned=as_planned,
        tolerance=tolerance, seed=seed,
    )  # fmt: skip
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        _show(found)
    if not found.agrees:
        raise typer.Exit(1)


def _changed(plan: PlanFile, text: str | None) -> Layout:
    """The plan's layout with the fields that `text` names replaced."""
    from loadmaster.describe.layout import Layout

    if text is None:
        return plan.layout
    named = [part.partition("=")[0].strip() for part in text.split(",") if part.strip()]
    given = Layout.parse(text).to_dict()
    return replace(plan.layout, **{name: given[name] for name in named})


def _show(found: Verification) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(emoji=False)
    table = Table(title=f"{found.layout.describe()} against one process", title_justify="left")
    for name in ("step", "loss", "one process", "gradient norm", "one process", "gradients differ", "weights differ"):
        table.add_column(name, justify="right")
    for s in found.steps:
        weight = "8-bit state" if s.weight is None else f"{s.weight:.1e}"
        table.add_row(
            str(s.step), f"{s.loss:.6f}", f"{s.reference_loss:.6f}", f"{s.grad_norm:.6f}",
            f"{s.reference_grad_norm:.6f}", f"{s.gradient:.1e}", weight,
        )  # fmt: skip
    console.print(table)
    verdict = "[bold green]computes the same[/]" if found.agrees else "[bold red]does not compute the same[/]"
    console.print(f"{verdict}: {found.reason()} (allowed {found.tolerance:.0e})", highlight=False)
