"""``loadmaster plan``: which layout is the fastest that fits on these devices?"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from loadmaster.cli.given import add_step_options, new_parser, read_cluster, read_workload

if TYPE_CHECKING:
    from loadmaster.errors import DoesNotFit
    from loadmaster.planner.search import PlanResult

__all__ = ["parser", "run"]


def parser() -> ArgumentParser:
    """The command's options."""
    made = new_parser(
        "plan",
        "Find the fastest layout of MODEL that fits; say what to cut first, what the next-best trade and why\n"
        "others are refused. Exit status 1 when nothing fits.",
    )
    add_step_options(made)
    add = made.add_argument
    add("--on", metavar="CLUSTER", required=True, help="64xh100-sxm, or a cluster file (.toml)")
    add("--batch", metavar="N", required=True, help="global batch: sequences (512), or tokens with a unit (4Mi)")
    add("--devices", metavar="N", type=int, help="use that many devices of the cluster's kind")
    add("--precision", metavar="NAME", help="bf16-mixed, fp32, ...; left out: the device's fastest mixed one")
    add("--optimizer-bits", metavar="N", type=int, help="32 or 8; left out: 8 only where nothing fits with 32")
    add("--objective", metavar="NAME", default="time", help="time, dollars (with --price) or devices (the fewest)")
    add("--price", metavar="DOLLARS", type=float, help="of a device-hour")
    add("--risk", metavar="P", type=float, default=0.1, help="largest probability of running out of memory (0.1)")
    add("--output", "-o", metavar="FILE", help="write the best plan to this file")
    return made


def run(args: Namespace) -> int:
    """Search, print, write; 1 when nothing fits."""
    from loadmaster.cli.outputs import check_writable
    from loadmaster.describe.families import read_config
    from loadmaster.describe.model import Model
    from loadmaster.describe.require import real
    from loadmaster.planner.explain import explain
    from loadmaster.planner.objective import search

    if args.output is not None:
        check_writable(args.output)
    if args.price is not None:
        real("--price", args.price, above=0)
    name, config = read_config(args.model)
    cluster = read_cluster(args, devices=args.devices)
    model = Model.from_hf(args.model)
    result = search(
        model, cluster, read_workload(args, model), objective=args.objective, price_per_hour=args.price,
        stack=args.stack, precision=args.precision, optimizer_bits=args.optimizer_bits, max_risk=args.risk,
    )  # fmt: skip
    if result.best is None:
        if args.json:
            _print_json(result.to_json())
        raise _nothing_fits(result)
    if args.output is not None:
        _save(args.output, result, name, config)
    explanation = explain(result)
    if args.json:
        document = result.to_json()
        document["plans"][0]["remedies"] = [r.to_json() for r in explanation.remedies]
        _print_json({**document, "explanation": explanation.to_json()})
        return 0
    from loadmaster.report.plan import print_plan

    print_plan(result, explanation)
    if args.output is not None:
        print(f"Wrote {args.output}; run it with: loadmaster train {args.output} --data DIR")
    return 0


def _print_json(document: Mapping[str, Any]) -> None:
    import json

    print(json.dumps(document))


def _nothing_fits(result: PlanResult) -> DoesNotFit:
    """What the leanest layout needs, and what would hold it."""
    from loadmaster.errors import DoesNotFit
    from loadmaster.units import MIB, format_bytes

    cluster, least = result.cluster, result.smallest
    assert least is not None
    needs = int(least.memory.total)
    return DoesNotFit(
        f"nothing fits: {format_bytes(cluster.memory_bytes)} a rank on {cluster.num_devices} x {cluster.device.name}, "
        f"and the leanest layout ({least.layout.describe()}) needs {format_bytes(needs)} ({needs} bytes); "
        f"give that and a margin (--memory-cap {-(-needs * 21 // (20 * MIB))}MiB), more devices, a shorter sequence, "
        "or --loss fused"
    )


def _save(path: str, result: PlanResult, name: str, config: Mapping[str, Any]) -> None:
    from loadmaster.describe.plan_file import PlanFile

    assert result.best is not None
    cost = result.best.cost
    PlanFile(
        name=name, config=config, cluster=result.cluster, workload=result.workload, layout=cost.layout,
        stack=result.stack, predicted={"memory": cost.memory, "time": cost.time, "traffic": cost.traffic},
    ).save(path)  # fmt: skip
