"""A search as tables for people: the plans, the explanation, the refusals."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadmaster.describe.layout import Layout
from loadmaster.laws.cost import Cost
from loadmaster.planner.explain import Explanation
from loadmaster.planner.search import PlanResult
from loadmaster.report.cost import memory_bar, remedy_table
from loadmaster.units import format_bytes, format_seconds

__all__ = ["print_plan"]


def print_plan(result: PlanResult, explanation: Explanation, console: Console | None = None) -> None:
    """Print the best plans and what surrounds them."""
    out = console or Console(emoji=False)
    assert result.best is not None
    best = result.best.cost
    out.print(
        f"[bold]{result.model.name}[/bold] on {result.cluster.num_devices} x {result.cluster.device.name}, "
        f"stack {result.stack}: {result.considered:,} layouts considered, {result.priced:,} priced "
        f"in {format_seconds(result.seconds)}"
    )
    for note in result.notes:
        out.print(Text(note, style="yellow"))
    out.print(_plans(result))
    out.print(Text(f"Best: {best.layout.describe()}", style="bold green"))
    out.print(memory_bar(best.memory, best.cluster.memory_bytes, width=min(out.width, 100)))
    if explanation.remedies:
        out.print(remedy_table(explanation.remedies, fits=True, limit=5))
    out.print(_surroundings(result, explanation))
    if result.rejections:
        out.print(_refusals(result))


def _plans(result: PlanResult) -> Table:
    table = Table(title="Plans, fastest first", title_justify="left", box=None, pad_edge=False, title_style="bold")
    for name in ("", "step", "tokens/s", "MFU", "memory", "out of memory", "layout"):
        table.add_column(name, justify="left" if name == "layout" else "right", overflow="fold")
    for place, plan in enumerate(result.plans, 1):
        cost = plan.cost
        table.add_row(
            str(place), format_seconds(cost.step_seconds), f"{cost.tokens_per_second:,.0f}", _utilisation(cost),
            format_bytes(cost.memory.total), f"{cost.out_of_memory_probability:.1%}", _short(plan.layout),
        )  # fmt: skip
    return table


def _short(layout: Layout) -> str:
    """The layout without what all plans share."""
    return replace(layout, precision=Layout().precision).describe()


def _utilisation(cost: Cost) -> str:
    if cost.mfu is None:
        return f"{cost.flops_per_second_per_device / 1e12:.3g} TFLOP/s"
    return f"{cost.mfu:.1%}"


def _surroundings(result: PlanResult, explanation: Explanation) -> Text:
    assert result.best is not None
    text = Text()
    base = result.best.cost.step_seconds
    for what, seconds in explanation.bandwidth:
        text.append(f"With {what}: a step of {format_seconds(seconds)} ({seconds / base - 1:+.1%})\n")
    if explanation.split is not None:
        layers, seconds = explanation.split
        text.append(f"With the layers split {'-'.join(map(str, layers))}: a step of {format_seconds(seconds)} ")
        text.append(f"({seconds / base - 1:+.1%})\n")
    if explanation.smallest_devices is not None:
        text.append(f"Fewest devices of this kind that hold the model: {explanation.smallest_devices}\n")
    if result.smallest is not None:
        least = result.smallest
        text.append(
            f"Least memory: {format_bytes(least.memory.total)} at {format_seconds(least.step_seconds)} a step, "
        )
        text.append(least.layout.describe())
    return text


def _refusals(result: PlanResult) -> Table:
    """The fastest that do not fit, and the first example of every rule."""
    table = Table(title="Refused", title_justify="left", box=None, pad_edge=False, title_style="bold")
    for name in ("layout", "because", "way out"):
        table.add_column(name, overflow="fold")
    memory = [r for r in result.rejections if r.shortfall is not None][:3]
    rules = {r.error.rule.split(",")[0].split(" = ")[0]: r for r in reversed(result.rejections) if r.error is not None}
    for refusal in [*memory, *reversed(rules.values())]:
        table.add_row(refusal.layout.describe(), refusal.rule, refusal.way_out)
    return table
