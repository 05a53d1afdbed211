"""``loadmaster catalog``: which models, devices and stacks are known by name?"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from loadmaster.cli.given import new_parser

__all__ = ["parser", "run"]


def parser() -> ArgumentParser:
    """The command's options."""
    made = new_parser("catalog", "List the models, devices and training stacks that are known by name.")
    made.add_argument("--json", action="store_true", help="print one JSON document")
    return made


def run(args: Namespace) -> int:
    """Print the lists."""
    from loadmaster.describe.cluster import Cluster, device_names
    from loadmaster.describe.families import catalogue
    from loadmaster.describe.stack import STACKS

    devices = [Cluster.parse(name) for name in device_names()]
    if args.json:
        import json

        rows = [
            {
                "name": c.device.name, "memory_bytes": c.device.memory_bytes,
                "memory_bandwidth": c.device.memory_bandwidth, "peak_flops": dict(c.device.peak_flops),
                "devices_per_node": c.devices_per_node, "source": c.device.source,
            }
            for c in devices
        ]  # fmt: skip
        print(json.dumps({"models": list(catalogue()), "devices": rows, "stacks": list(STACKS)}))
        return 0
    from loadmaster.report.catalog import print_catalog

    print_catalog(list(catalogue()), [c.device for c in devices], list(STACKS))
    return 0
