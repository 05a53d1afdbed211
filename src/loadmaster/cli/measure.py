"""``loadmaster measure``: how fast are my devices and links really?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadmaster.units import format_bytes, format_count, format_seconds, parse_count

if TYPE_CHECKING:
    from loadmaster.probe.measure import Measurement


def command(
    output: Annotated[str, typer.Option("--output", "-o", help="Cluster file to write.")] = "here.toml",
    ranks: Annotated[int, typer.Option(help="Local processes at work together (under torchrun: as it says).")] = 2,
    thorough: Annotated[bool, typer.Option(help="More sizes and repeats: minutes, not seconds.")] = False,
    memory_cap: Annotated[str | None, typer.Option(help="Bytes a rank may use, e.g. 1GiB.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure matrix and memory rates and the links between ranks, and write them as a cluster file."""
    from loadmaster.cli.outputs import check_writable
    from loadmaster.probe.measure import measure_in_full

    check_writable(output)
    cap = None if memory_cap is None else parse_count(memory_cap, field="--memory-cap")
    found = measure_in_full(ranks=ranks, thorough=thorough, memory_cap=cap, device=device, quiet=as_json)
    found.save(output)
    if as_json:
        print(json.dumps({**found.to_dict(), "output": str(Path(output))}))
    else:
        _show(found, output)


def _show(found: Measurement, output: str) -> None:
    from rich.console import Console
    from rich.table import Table

    cluster = found.cluster
    table = Table(title=f"{cluster.device.name}: {cluster.num_devices} ranks at work together", title_justify="left")
    for name in ("what", "rate", "latency", "spread"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for name, rate in found.rates.items():
        what, unit = ("memory copy", "B/s") if name == "memory" else (f"matrix products, {name}", "FLOP/s")
        table.add_row(what, f"{format_count(rate['value'])}{unit}", "", f"{rate['spread']:.0%}")
    for tier, operations in found.operations.items():
        for name, line in operations.items():
            spread = max(line["spread"])
            what = f"{name.replace('_', '-')}, {line['ranks']} ranks {tier.replace('_', ' ')}"
            table.add_row(
                what, f"{format_count(line['bandwidth'])}B/s", format_seconds(line["latency"]), f"{spread:.0%}"
            )
    console = Console(emoji=False)
    console.print(table)
    console.print(
        f"memory of a rank {format_bytes(cluster.memory_bytes)}; wrote {output} (give it as --on)", highlight=False
    )
