"""``loadmaster catalog``: which models, devices and stacks are known by name?"""

from __future__ import annotations

import json
from typing import Annotated

import typer

__all__ = ["command"]


def command(as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False) -> None:
    """List the models, devices and training stacks that are known by name."""
    from loadmaster.describe.cluster import Cluster, device_names
    from loadmaster.describe.families import catalogue
    from loadmaster.describe.stack import STACKS

    devices = [Cluster.parse(name) for name in device_names()]
    if as_json:
        rows = [
            {
                "name": c.device.name, "memory_bytes": c.device.memory_bytes,
                "memory_bandwidth": c.device.memory_bandwidth, "peak_flops": dict(c.device.peak_flops),
                "devices_per_node": c.devices_per_node, "source": c.device.source,
            }
            for c in devices
        ]  # fmt: skip
        print(json.dumps({"models": list(catalogue()), "devices": rows, "stacks": list(STACKS)}))
        return
    from loadmaster.report.catalog import print_catalog

    print_catalog(list(catalogue()), [c.device for c in devices], list(STACKS))
