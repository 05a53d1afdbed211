"""What several commands are given on the command line: the options they share, turned into values."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import replace
from typing import NoReturn

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.layout import Layout
from loadmaster.describe.model import Model
from loadmaster.describe.workload import LOSSES, Workload
from loadmaster.errors import InvalidInput, LoadmasterError
from loadmaster.units import parse_count

__all__ = ["add_step_options", "new_parser", "read_batch", "read_cluster", "read_layout", "read_workload"]


class _Parser(ArgumentParser):
    """Refuses in one line, as every other wrong input is."""

    def error(self, message: str) -> NoReturn:
        raise LoadmasterError(f"{message}; {self.prog} --help lists the options")


def new_parser(name: str, description: str) -> ArgumentParser:
    """An empty parser of one command."""
    return _Parser(
        prog=f"loadmaster {name}", description=description, formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip


def add_step_options(parser: ArgumentParser) -> None:
    """The options that say what a step is: model, sequence, optimizer, loss, stack."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="catalogue name, config.json or its folder")
    add("--seq", metavar="N", help="tokens a sequence (2048, or the model's positions where fewer)")
    add("--memory-cap", metavar="BYTES", help="bytes a rank may use, e.g. 24GiB")
    add("--stack", metavar="NAME", default="loadmaster", help="training software (see: loadmaster catalog)")
    add("--optimizer", metavar="NAME", default="adamw", help="adamw, sgd, sgd_momentum, lion, ...")
    add("--loss", metavar="NAME", default="cross_entropy", help="cross_entropy, fused, fused_native or chunked")
    add("--causal", action="store_true", help="count attention FLOPs as causal: half")
    add("--json", action="store_true", help="print one JSON document")


def read_batch(text: str, seq_len: int) -> int:
    """Sequences of a global batch: a plain number counts sequences, one with a unit (``4Mi``, ``512k``) tokens.

    Raises:
        InvalidInput: no number, or tokens that are no whole number of sequences.

    >>> read_batch("32", 8192), read_batch("4Mi", 8192)
    (32, 512)
    """
    count = parse_count(text, field="--batch")
    if re.fullmatch(r"\s*\d+\s*", text):
        return count
    if count % seq_len:
        near = [n * seq_len for n in (count // seq_len, count // seq_len + 1) if n]
        raise InvalidInput(
            "--batch", text, f"is {count} tokens, no whole number of sequences of {seq_len}",
            f"use {' or '.join(f'{n // seq_len} sequences ({n} tokens)' for n in near)}",
        )  # fmt: skip
    return count // seq_len


def read_workload(args: Namespace, model: Model, *, default_batch: int | None = None) -> Workload:
    """The step's work."""
    seq_len = min(2048, model.max_seq_len or 2048) if args.seq is None else parse_count(args.seq, field="--seq")
    if seq_len < 1:
        raise InvalidInput("--seq", args.seq, "must be at least 1", "give the tokens of a sequence")
    if args.loss not in LOSSES:
        raise InvalidInput("--loss", args.loss, "is not known", f"use one of {', '.join(LOSSES)}")
    batch = default_batch if args.batch is None and default_batch else read_batch(args.batch, seq_len)
    if batch * seq_len > 1 << 44:
        raise InvalidInput(
            "--batch times --seq", f"{batch} * {seq_len}", "is more than 2^44 tokens a step", "give fewer of either"
        )
    return Workload(
        global_batch_size=batch, seq_len=seq_len, optimizer=args.optimizer, loss=args.loss, causal=args.causal
    )


def read_cluster(args: Namespace, *, devices: int | None = None) -> Cluster:
    """The machine, resized to `devices` and capped to ``--memory-cap`` bytes a rank where given."""
    cluster = Cluster.parse(args.on)
    if devices is not None:
        cluster = cluster.resized(devices)
    if args.memory_cap is not None:
        cap = parse_count(args.memory_cap, field="--memory-cap")
        if cap < 1:
            raise InvalidInput("--memory-cap", args.memory_cap, "must be at least one byte", "write e.g. 24GiB")
        cluster = replace(cluster, memory_cap=cap)
    return cluster


def read_layout(text: str, cluster: Cluster) -> Layout:
    """The layout; where no data-parallel degree is given, dp_shard takes the devices that are left.

    >>> read_layout("tp=4", Cluster.parse("16xh100-sxm")).dp_shard
    4
    """
    layout = Layout.parse(text)
    named = {part.split("=")[0].strip() for part in text.split(",")}
    rest, over = divmod(cluster.num_devices, layout.world_size)
    if named & {"dp_shard", "dp_replicate"} or over or rest < 2:
        return layout
    return replace(layout, dp_shard=rest)
