"""One priced layout as tables for people: a memory bar, the three ledgers, what to cut first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadmaster.laws.cost import Cost
from loadmaster.ledger import Ledger
from loadmaster.planner.remedies import Remedy
from loadmaster.units import format_bytes, format_count, format_seconds

__all__ = ["memory_bar", "print_cost", "remedy_table"]

_COLOURS = (
    "blue",
    "cyan",
    "magenta",
    "green",
    "yellow",
    "red",
    "bright_blue",
    "bright_magenta",
    "bright_cyan",
    "white",
)


def print_cost(cost: Cost, found: Sequence[Remedy] = (), console: Console | None = None) -> None:
    """Print everything about one layout."""
    out = console or Console(emoji=False)
    out.print(_headline(cost))
    out.print(memory_bar(cost.memory, cost.cluster.memory_bytes, width=min(out.width, 100)))
    out.print(_ledger_table("Memory, peak of the worst rank", cost.memory, format_bytes))
    out.print(_ledger_table("Time of a step", cost.time, format_seconds))
    traffic = cost.traffic
    if len(traffic):
        out.print(_ledger_table("Traffic, sent by a rank in a step", traffic, format_bytes))
    out.print(_speed(cost))
    if found:
        out.print(remedy_table(found, fits=cost.fits))


def _headline(cost: Cost) -> Text:
    layout = cost.layout
    text = Text()
    text.append(f"{cost.model.name}", style="bold")
    text.append(f" ({format_count(cost.model.num_params)} parameters) on {cost.cluster.num_devices} x ")
    text.append(f"{cost.cluster.device.name}, stack {cost.stack}\n")
    text.append(f"{layout.describe()}; {layout.num_micro_batches(cost.workload)} micro-batches of ")
    text.append(f"{layout.micro_batch_size} x {cost.workload.seq_len} tokens\n")
    if cost.fits:
        text.append(f"Fits, {format_bytes(cost.headroom_bytes)} left", style="bold green")
    else:
        text.append(f"Does not fit: {format_bytes(-cost.headroom_bytes)} too much", style="bold red")
    text.append(f" of {format_bytes(cost.cluster.memory_bytes)}; peak {format_bytes(cost.memory.total)}")
    text.append(f" ({format_bytes(cost.memory_interval.low)} to {format_bytes(cost.memory_interval.high)}")
    text.append(f" in nine of ten runs), out of memory with probability {cost.out_of_memory_probability:.0%}")
    return text


def memory_bar(memory: Ledger, limit: int, *, width: int = 80) -> RenderableType:
    """The terms as one bar over the device's memory, with a legend."""
    top = {k: v for k, v in memory.top().terms.items() if v > 0}
    total = sum(top.values())
    scale = max(total, limit)
    bar, legend = Text(), Text()
    for (name, size), colour in zip(sorted(top.items(), key=lambda kv: -kv[1]), _COLOURS * 3, strict=False):
        bar.append("█" * round(width * size / scale), style=colour)
        legend.append("█ ", style=colour)
        legend.append(f"{name} {format_bytes(size)}   ")
    if total <= limit:
        bar.append("·" * max(0, width - len(bar)), style="dim")
    else:
        mark = round(width * limit / scale)
        bar = bar[:mark] + Text("|", style="bold red on white") + bar[mark:]
    return Group(bar, legend, Text())


def _ledger_table(title: str, ledger: Ledger, write: object) -> Table:
    assert callable(write)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, title_style="bold")
    table.add_column("term")
    table.add_column(ledger.unit, justify="right")
    table.add_column("share", justify="right")
    total = ledger.total or 1
    for name, number in ledger.terms.items():
        table.add_row(name, write(number), f"{number / total:.1%}")
    table.add_row("total", write(ledger.total), "", style="bold")
    return table


def _speed(cost: Cost) -> Text:
    text = Text()
    text.append(f"Step {format_seconds(cost.step_seconds)}", style="bold")
    text.append(f" ({format_seconds(cost.time_interval.low)} to {format_seconds(cost.time_interval.high)}), ")
    text.append(f"{cost.tokens_per_second:,.0f} tokens/s, {cost.tokens_per_second_per_device:,.0f} a device, ")
    text.append(f"{cost.flops_per_second_per_device / 1e12:.1f} TFLOP/s a device\n")
    counted = "causal: half" if cost.workload.causal else "full"
    if cost.mfu is None or cost.hfu is None:
        text.append("; ".join(cost.notes))
    else:
        text.append(f"MFU {cost.mfu:.1%}, HFU {cost.hfu:.1%} of {cost.peak_flops or 0:.4g} FLOP/s dense ")
        text.append(f"(attention counted {counted}; HFU counts recompute)")
    if cost.bubble_fraction:
        text.append(f"; pipeline bubble {cost.bubble_fraction:.1%} of the step")
    return text


def remedy_table(found: Sequence[Remedy], *, fits: bool, limit: int = 8) -> Table:
    """What to cut first."""
    table = Table(title="Cut first", title_justify="left", box=None, pad_edge=False, title_style="bold")
    for name in ("change", "saves", "adds to a step"):
        table.add_column(name, justify="left" if name == "change" else "right")
    if not fits:
        table.add_column("then it fits")
    for remedy in found[:limit]:
        row = [remedy.change, format_bytes(remedy.bytes_saved), format_seconds(remedy.seconds_added)]
        table.add_row(*row, *([] if fits else ["yes" if remedy.fits else "no"]))
    return table
