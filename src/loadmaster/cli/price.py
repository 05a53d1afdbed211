"""``loadmaster price``: does this layout fit, how long is a step, what should be cut first?"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from loadmaster.cli.given import add_step_options, new_parser, read_cluster, read_layout, read_workload

__all__ = ["parser", "run"]


def parser() -> ArgumentParser:
    """The command's options."""
    made = new_parser(
        "price",
        "Price one layout of MODEL on a cluster: memory, time and traffic of a step, term by term.\n"
        "Exit status 1 when it does not fit.",
    )
    add_step_options(made)
    made.add_argument("--on", metavar="CLUSTER", default="h100-sxm", help="8xh100-sxm, or a cluster file (.toml)")
    made.add_argument(
        "--batch", metavar="N", help="global batch: sequences (32), or tokens with a unit (4Mi); one a data rank"
    )
    made.add_argument(
        "--layout", metavar="TEXT", default="",
        help="tp=2,pp=4,zero=1,recompute=full ...; dp_shard, left out, takes the devices that are left",
    )  # fmt: skip
    return made


def run(args: Namespace) -> int:
    """Price, print; 1 when it does not fit."""
    from loadmaster.describe.model import Model
    from loadmaster.laws.cost import price
    from loadmaster.planner.remedies import remedies

    cluster = read_cluster(args)
    layout = read_layout(args.layout, cluster)
    model = Model.from_hf(args.model)
    workload = read_workload(args, model, default_batch=layout.dp * layout.micro_batch_size)
    cost = price(model, cluster, workload, layout, stack=args.stack)
    found = remedies(cost)
    if args.json:
        import json

        print(json.dumps(cost.to_json([remedy.to_json() for remedy in found])))
    else:
        from loadmaster.report.cost import print_cost

        print_cost(cost, found)
    return 0 if cost.fits else 1
