"""``loadmaster audit``: fp16 or bf16? Which updates are lost?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from loadmaster.runtime.audit import Audit

_MARKS = {"error": "[bold red]error[/]", "warning": "[yellow]warning[/]", "note": "[dim]note[/]"}


def command(
    target: Annotated[
        str, typer.Argument(metavar="PLAN|PKG.MOD:FACTORY", help="A plan file, or package.module:factory.")
    ],
    data: Annotated[str | None, typer.Option(help="Text to audit on, or random tokens.")] = None,
    steps: Annotated[int, typer.Option(help="Steps to run.")] = 3,
    seq: Annotated[int | None, typer.Option(help="Tokens a sequence; else the plan's, at most 512.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences a step; else the plan's, at most 4.")] = None,
    layers: Annotated[int | None, typer.Option(help="Audit a model of this many layers: layers are alike.")] = None,
    precision: Annotated[str | None, typer.Option(help="Precision to judge; the plan's where not given.")] = None,
    lr: Annotated[float, typer.Option(help="Learning rate of the steps.")] = 3e-4,
    eps: Annotated[float, typer.Option(help="Adam's epsilon.")] = 1e-8,
    init_scale: Annotated[float, typer.Option(help="First scale of dynamic loss scaling.")] = 2.0**16,
    seed: Annotated[int, typer.Option(help="Of weights and tokens.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Run a few steps in fp32 here and say what half precision would make of their numbers; exit 1 on an error."""
    from importlib.util import find_spec

    from loadmaster.errors import MissingDependency

    if find_spec("torch") is None:
        raise MissingDependency("audit", "torch", "runtime")
    from loadmaster.runtime.audit_plan import audit_plan

    found = audit_plan(
        target, steps=steps, seq_len=seq, batch_size=batch, layers=layers, data=data, seed=seed, precision=precision,
        lr=lr, eps=eps, init_scale=init_scale,
    )  # fmt: skip
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        _show(found)
    if not found.ok:
        raise typer.Exit(1)


def _show(found: Audit) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(emoji=False)
    table = Table(title=f"audit for {found.precision}", title_justify="left", show_lines=True)
    for name in ("", "what", "way out"):
        table.add_column(name, overflow="fold")
    for finding in found.findings:
        where = f"\n[dim]{', '.join(finding.where)}[/]" if finding.where else ""
        table.add_row(_MARKS[finding.severity], f"{finding.message}{where}", finding.way_out)
    if found.findings:
        console.print(table)
    console.print(_formats(found))
    figures = found.to_json()["measured"]
    console.print(
        f"largest activation {figures['activation_largest']:.4g}, largest gradient {figures['gradient_largest']:.3g}",
        highlight=False,
    )
    console.print(f"[bold]{found.recommendation}[/]", highlight=False)


def _formats(found: Audit) -> Table:
    """fp16 beside bf16."""
    from rich.table import Table

    rows = found.to_json()["measured"]["formats"]
    table = Table(title="what each format would have lost of these steps", title_justify="left")
    for name in ("", *rows):
        table.add_column(name, justify="left" if not name else "right")
    lines = (
        ("largest number it holds", "largest_held", "{:.4g}"),
        ("modules whose output overflows", "activations_overflow", "{:.0f}"),
        ("activations that become 0", "activations_lost", "{:.2%}"),
        ("gradients that become 0, unscaled", "gradients_lost_unscaled", "{:.2%}"),
        ("loss scale that fits", "loss_scale", "{:g}"),
        ("gradients that become 0 at that scale", "gradients_lost_scaled", "{:.2%}"),
        ("updates lost without fp32 masters", "updates_lost", "{:.1%}"),
    )
    for label, key, form in lines:
        table.add_row(label, *(form.format(row[key]) for row in rows.values()))
    return table
