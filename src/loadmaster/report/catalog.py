"""What is known by name, as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Console
from rich.table import Table

from loadmaster.describe.cluster import Device
from loadmaster.units import format_bytes

__all__ = ["print_catalog"]


def print_catalog(models: Sequence[str], devices: Sequence[Device], stacks: Sequence[str]) -> None:
    """Print the three lists."""
    out = Console(emoji=False)
    out.print("[bold]Models[/bold]")
    out.print(Columns(list(models), padding=(0, 3)))
    table = Table(title="Devices", title_justify="left", box=None, pad_edge=False, title_style="bold")
    for name in ("name", "memory", "bandwidth", "dense bf16 peak", "source"):
        table.add_column(name, justify="left" if name in ("name", "source") else "right")
    for device in devices:
        peak = device.peak("bf16")
        table.add_row(
            device.name, format_bytes(device.memory_bytes), f"{device.memory_bandwidth / 1e12:.2f} TB/s",
            "none" if peak is None else f"{peak / 1e12:.1f} TFLOP/s", device.source,
        )  # fmt: skip
    out.print(table)
    out.print("[bold]Stacks[/bold]")
    out.print(", ".join(stacks))
