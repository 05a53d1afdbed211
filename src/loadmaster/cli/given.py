"""What several commands are given on the command line, turned into values of the describe floor."""

from __future__ import annotations

import re
from dataclasses import replace

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.layout import Layout
from loadmaster.describe.workload import Workload
from loadmaster.errors import InvalidInput
from loadmaster.units import parse_count

__all__ = ["read_batch", "read_cluster", "read_layout", "read_workload"]


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
            f"use {' or '.join(map(str, near))} tokens, or a plain number of sequences",
        )  # fmt: skip
    return count // seq_len


def read_workload(*, batch: str, seq: str, optimizer: str, loss: str, causal: bool) -> Workload:
    """The step's work."""
    seq_len = parse_count(seq, field="--seq")
    if seq_len < 1:
        raise InvalidInput("--seq", seq, "must be at least 1", "give the tokens of a sequence")
    return Workload(
        global_batch_size=read_batch(batch, seq_len), seq_len=seq_len, optimizer=optimizer, loss=loss, causal=causal
    )


def read_cluster(spec: str, *, memory_cap: str | None = None, devices: int | None = None) -> Cluster:
    """The machine, resized to `devices` and capped to `memory_cap` bytes a rank where given."""
    cluster = Cluster.parse(spec)
    if devices is not None:
        cluster = cluster.resized(devices)
    if memory_cap is not None:
        cap = parse_count(memory_cap, field="--memory-cap")
        if cap < 1:
            raise InvalidInput("--memory-cap", memory_cap, "must be at least one byte", "write e.g. 24GiB")
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
