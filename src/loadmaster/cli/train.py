"""``loadmaster train``: run a plan on local ranks or under torchrun, then set predicted against measured."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.layout import Layout
from loadmaster.describe.plan_file import PlanFile
from loadmaster.describe.precision import Precision
from loadmaster.describe.require import whole
from loadmaster.errors import InvalidInput, LoadmasterError, MissingDependency

if TYPE_CHECKING:
    from loadmaster.laws.cost import Cost  # type: ignore[import-not-found,unused-ignore]
    from loadmaster.runtime.run import Run

# what PyTorch's C++ says for its developers: of lost connections, and of the profiler that measures the peak
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "99"}


def command(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="Plan file, as loadmaster plan -o writes it.")],
    data: Annotated[str, typer.Option(help="Text, JSONL, Parquet, a dataset on disk, a folder of them; or stdlib.")],
    out: Annotated[str | None, typer.Option("--out", "-o", help="Folder of the run [runs/<plan's name>].")] = None,
    tokenizer: Annotated[str, typer.Option(help="A Hugging Face tokenizer.json or its folder, or bytes.")] = "bytes",
    text_field: Annotated[str, typer.Option(help="Key or column of the text.")] = "text",
    steps: Annotated[int, typer.Option(help="Optimizer steps of the whole run.")] = 100,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 3e-4,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 10,
    schedule: Annotated[str, typer.Option(help="cosine, linear or constant.")] = "cosine",
    final_lr: Annotated[float, typer.Option(help="Share of the rate that is left at the end.")] = 0.1,
    weight_decay: Annotated[float, typer.Option(help="On matrices; vectors get none.")] = 0.1,
    clip: Annotated[float, typer.Option(help="Largest gradient norm; 0: no clipping.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of weights, order of the data, dropout.")] = 0,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations on held-out text; 0: none.")] = 0,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: at the end alone.")] = 0,
    keep: Annotated[int, typer.Option(help="Checkpoints that stay.")] = 2,
    async_save: Annotated[bool, typer.Option(help="Write checkpoints while training goes on.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    resume_from: Annotated[str | None, typer.Option(help="Go on from this checkpoint, or run's newest.")] = None,
    layout: Annotated[str | None, typer.Option(help="Change fields of the plan's layout: dp_shard=3,zero=1.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="OpenMP threads a local rank [the cores shared out].")] = None,
    tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard event files too.")] = True,
    export_hf: Annotated[str | None, typer.Option(help="Write the trained model to this Hugging Face folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Train the plan's model, then print predicted against measured and write ledger.json."""
    from loadmaster.cli.outputs import check_writable_folder
    from loadmaster.ranks import run_ranks

    leads = os.environ.get("RANK", "0") == "0"
    for name, level in QUIET.items():
        os.environ.setdefault(name, level)
    try:
        _need_runtime()
        if not data.strip():
            raise InvalidInput("--data", repr(data), "names nothing", "give text files, their folder, or stdlib")
        if threads is not None:
            whole("--threads", threads)
        chosen = _changed(PlanFile.load(plan), layout)
        folder = out or f"runs/{Path(plan).stem}"
        check_writable_folder(folder)
        if export_hf is not None:
            check_writable_folder(export_hf)
        cost = _price(chosen)
        run = _run(
            chosen, cost, data=data, out=folder, tokenizer=tokenizer, text_field=text_field, steps=steps, lr=lr,
            warmup=warmup, schedule=schedule, final_lr=final_lr, weight_decay=weight_decay, clip=clip, seed=seed,
            eval_every=eval_every, save_every=save_every, keep=keep, asynchronous=async_save,
            resume=_resume(resume), resume_from=resume_from, device=device, tensorboard=tensorboard, quiet=as_json,
            export_hf=export_hf,
        )  # fmt: skip
        _check_before_start(run)
    except LoadmasterError as error:
        if leads:
            raise
        raise typer.Exit(error.exit_status) from None  # every rank of torchrun sees the same; rank 0 says it
    if _under_torchrun():
        from loadmaster.runtime.train import train_rank

        outcome = train_rank(run.to_json())
    else:
        hint = f"go on with --resume from {run.checkpoints}" if save_every else ""
        logs = Path(folder) / "logs"
        results = run_ranks(
            "loadmaster.runtime.train:train_rank", run.to_json(), world_size=run.layout.world_size, threads=threads,
            log_dir=logs, hint=hint,
        )  # fmt: skip
        outcome = results[0]
    if leads:
        _finish(run, cost, chosen, outcome, as_json=as_json)


def _need_runtime() -> None:
    from importlib.util import find_spec

    for package in ("torch", "transformers", "safetensors"):
        if find_spec(package) is None:
            raise MissingDependency("training", package, "runtime")


def _changed(plan: PlanFile, layout: str | None) -> PlanFile:
    """The plan with the fields of its layout that `layout` names replaced."""
    if layout is None:
        return plan
    named = {part.partition("=")[0].strip() for part in layout.split(",") if part.strip()}
    given = Layout.parse(layout).to_dict()
    changed = dataclasses.replace(plan.layout, **{n: given[n] for n in named})
    return dataclasses.replace(plan, layout=changed, predicted={} if changed != plan.layout else plan.predicted)


def _price(plan: PlanFile) -> Cost | None:
    """What the laws say of the plan here and now; None for a factory, which no law describes."""
    from loadmaster.laws.cost import price

    if plan.config is None:
        return None
    cluster = plan.cluster
    if plan.layout.world_size != cluster.num_devices:
        cluster = _resized(cluster, plan.layout.world_size)
    return price(plan.model(), cluster, plan.workload, plan.layout, stack="loadmaster")


def _resized(cluster: Cluster, ranks: int) -> Cluster:
    """Another number of ranks: on the one node there is, else on as many nodes as it takes."""
    if cluster.num_nodes == 1:
        return dataclasses.replace(cluster, devices_per_node=ranks)
    return cluster.resized(ranks)


def _run(plan: PlanFile, cost: Cost | None, **given: Any) -> Run:
    from loadmaster.runtime.run import Run

    compute = Precision.named(plan.layout.precision).compute
    return Run(
        config=None if plan.config is None else dict(plan.config), factory=plan.factory, layout=plan.layout,
        workload=plan.workload, name=plan.name, peak_flops=plan.cluster.device.peak(compute),
        flops_per_step=0.0 if cost is None else float(cost.flops["model"]), **given,
    )  # fmt: skip


def _resume(asked: bool) -> str:
    """torchrun restarts a run whose rank died: it goes on by itself where there is a checkpoint."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0) > 0:
        return "auto"
    return "yes" if asked else "no"


def _check_before_start(run: Run) -> None:
    """What can be refused before any rank is started."""
    from loadmaster.runtime.documents import find_documents
    from loadmaster.runtime.tokens import load_tokenizer
    from loadmaster.runtime.whole import find_checkpoint

    for axis in ("tp", "pp", "cp", "ep"):
        if getattr(run.layout, axis) != 1:
            raise InvalidInput(
                f"layout.{axis}", getattr(run.layout, axis), "is planned and priced but not run by this runtime",
                f"give --layout {axis}=1,dp_shard=N, or hand the plan on with loadmaster export",
            )  # fmt: skip
    find_documents(run.data, text_field=run.text_field)
    load_tokenizer(run.tokenizer)
    find_checkpoint(run)
    given = os.environ.get("WORLD_SIZE", "") if _under_torchrun() else ""
    if given and int(given) != run.layout.world_size:
        raise InvalidInput(
            "WORLD_SIZE", given,
            f"the plan's layout ({run.layout.describe()}) has {run.layout.world_size} ranks",
            "start as many, or give --layout with other degrees",
        )  # fmt: skip


def _under_torchrun() -> bool:
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def _finish(run: Run, cost: Cost | None, plan: PlanFile, outcome: Mapping[str, Any], *, as_json: bool) -> None:
    """Write ledger.json and print the tables."""
    from loadmaster.cli.compare import show_ledgers
    from loadmaster.describe.toml import write_atomic
    from loadmaster.report.comparison import compare_run, difference_json, read_ledgers

    if cost is not None:
        predicted = {"memory": cost.memory, "traffic": cost.traffic, "time": cost.time}
    else:  # a module that only code describes: what the plan says of it, if this is its layout
        predicted = dict(plan.predicted)
    comparisons = compare_run(predicted, read_ledgers(outcome["measured"]))
    body = {
        "predicted": {kind: ledger.to_json() for kind, ledger in predicted.items()},
        "measured": outcome["measured"],
        "difference": difference_json(comparisons),
        "run": {key: value for key, value in outcome.items() if key not in ("measured", "losses")},
        "losses": outcome["losses"],
        "layout": run.layout.to_dict(),
        "workload": dataclasses.asdict(run.workload),
        "model": plan.name,
        "cluster": plan.cluster.to_dict(),
        "summary": _summary(run, outcome),
    }
    write_atomic(run.folder / "ledger.json", json.dumps(body, indent=1) + "\n")
    if as_json:
        print(json.dumps(body))
    else:
        show_ledgers(body)


def _summary(run: Run, outcome: Mapping[str, Any]) -> list[str]:
    from loadmaster.units import format_count, format_seconds

    lines = []
    if outcome["final_loss"] is not None:
        lines.append(
            f"Loss {outcome['final_loss']:.3f} nats a token after {outcome['step']} steps (the last ten: "
            f"{outcome['recent_loss']:.3f}); unigram entropy of the text {outcome['entropy']:.3f}."
        )
        speed = f"A step took {format_seconds(outcome['step_seconds'])}: {outcome['tokens_per_second']:,.0f} tokens/s"
        rate = outcome["flops_per_second_per_device"]
        if outcome["mfu"] is not None:
            lines.append(f"{speed}, {outcome['mfu']:.1%} MFU of the peak of {format_count(run.peak_flops or 0)}FLOP/s.")
        else:
            lines.append(f"{speed}, {format_count(rate)}FLOP/s a rank; the device's peak is not known, so no MFU.")
    if outcome["eval_loss"] is not None:
        lines.append(f"Held-out loss {outcome['eval_loss']:.3f}.")
    lines.append(f"Written to {run.folder}: metrics.jsonl, ledger.json, checkpoints/.")
    return lines
