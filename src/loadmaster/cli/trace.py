"""``loadmaster trace``: where does the memory of my module go, op by op?"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from loadmaster.cli.outputs import check_writable
from loadmaster.errors import InvalidInput
from loadmaster.units import parse_count


def command(
    target: Annotated[str, typer.Argument(metavar="MODEL|PKG.MOD:FACTORY", help="Model name, config, or factory.")],
    batch: Annotated[int, typer.Option(help="Sequences (MODEL only).")] = 1,
    seq: Annotated[str, typer.Option(help="Tokens a sequence (MODEL only).")] = "2048",
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, bf16-mixed or fp16-mixed.")] = "bf16",
    optimizer: Annotated[str, typer.Option(help="adamw, adam, sgd, sgd_momentum, adagrad, adamw_fused.")] = "adamw",
    foreach: Annotated[bool, typer.Option(help="Update all parameters at once, as PyTorch does on a GPU.")] = True,
    recompute: Annotated[str, typer.Option(help="none or full: each repeated block checkpointed.")] = "none",
    clip: Annotated[float | None, typer.Option(help="Clip the gradient norm.")] = None,
    steps: Annotated[int, typer.Option(help="Training steps; the second has optimizer state.")] = 2,
    real: Annotated[bool, typer.Option(help="Run on real tensors (modules that branch on data).")] = False,
    layout: Annotated[str, typer.Option(help="Trace one rank: dp_shard=64,zero=3, tp=8, or a stage of pp=4.")] = "",
    rank: Annotated[int, typer.Option(help="Which rank of the layout.")] = 0,
    stage: Annotated[int, typer.Option(help="Which stage, with pp.")] = 0,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches of a step, with pp (2 * pp).")] = None,
    capacity: Annotated[str | None, typer.Option(help="Bytes the caching allocator may reserve, e.g. 80GiB.")] = None,
    alloc_conf: Annotated[str, typer.Option(help="As PYTORCH_CUDA_ALLOC_CONF, e.g. expandable_segments:True.")] = "",
    html: Annotated[str | None, typer.Option(help="Also write a chart as one self-contained file.")] = None,
    snapshot: Annotated[str | None, typer.Option(help="Also write a PyTorch memory snapshot (pickle).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Trace training steps of a module without a device: its peak, what is alive then, and who keeps it."""
    from loadmaster.describe.layout import Layout
    from loadmaster.describe.require import real as finite
    from loadmaster.describe.require import whole
    from loadmaster.report.timeline_text import print_timeline, timeline_json
    from loadmaster.trace.allocator import Rules
    from loadmaster.trace.api import trace
    from loadmaster.trace.replay import replay

    for path in (html, snapshot):
        if path is not None:
            check_writable(path)
    whole("--steps", steps)
    spread = Layout.parse(layout) if layout else None
    whole("--rank", rank, least=0, most=0 if spread is None else spread.world_size - 1)
    whole("--stage", stage, least=0, most=0 if spread is None else spread.pp - 1)
    if micro_batches is not None:
        whole("--micro-batches", micro_batches)
    if clip is not None:
        finite("--clip", clip, above=0)
    timeline = trace(
        _factory(target, batch, parse_count(seq, field="--seq")), optimizer=optimizer, foreach=foreach,
        precision=dtype, recompute=recompute, clip=clip, steps=steps, real=real, name=target,
        layout=spread, rank=rank, stage=stage, micro_batches=micro_batches,
    )  # fmt: skip
    limit = None if capacity is None else parse_count(capacity, field="--capacity")
    replayed = replay(timeline, Rules.parse(alloc_conf), capacity=limit)
    if html is not None:
        from loadmaster.report.timeline_html import timeline_html

        Path(html).write_text(timeline_html(timeline, capacity=limit), encoding="utf-8")
    if snapshot is not None:
        from loadmaster.trace.snapshot import write_snapshot

        write_snapshot(timeline, snapshot)
    if as_json:
        print(json.dumps({**timeline_json(timeline), "allocator": replayed.to_json()}))
    else:
        print_timeline(timeline, replayed=replayed, capacity=limit)
        for path in (html, snapshot):
            if path is not None:
                print(f"wrote {path}")
    if replayed.failure is not None:
        raise typer.Exit(1)


def _factory(target: str, batch: int, seq_len: int) -> Callable[[], Any]:
    """What builds module and inputs."""
    if batch < 1 or seq_len < 1:
        raise InvalidInput("--batch, --seq", (batch, seq_len), "must be at least 1", "give positive counts")
    if ":" not in target or os.path.exists(target):
        from loadmaster.describe.families import read_config
        from loadmaster.trace.hugging_face import factory_from_config

        return factory_from_config(read_config(target)[1], batch=batch, seq_len=seq_len)
    from loadmaster.trace.module_to_model import load_factory

    return load_factory(target)
