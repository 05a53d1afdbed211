"""The arguments of the memory law and what follows from them at once: shapes, shards, micro-batches, padding."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.layout import Layout
from loadmaster.describe.model import Model
from loadmaster.describe.precision import BYTES, Precision
from loadmaster.describe.stack import Stack
from loadmaster.describe.workload import Workload
from loadmaster.laws.numbers import Number, ceil_div, floor_div, greater, where
from loadmaster.laws.polynomial import Shape

__all__ = ["Run"]

_FROM_HOPPER_ON = ("h100", "h200", "h800", "gh200", "b200", "b300", "gb200", "gb300")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One pricing; every number may be a column.

    Attributes:
        precision: dtypes the stack uses for the layout's precision; shape: of a micro-batch on a rank.
        micro_batches: of a rank in a step; shards: ranks that share a dense parameter's state under ZeRO.
        expert_shards: the same for an expert's; padded_vocab: rows of the vocabulary tables.
        known: results that every stage shares.
        on_cpu: no device context, no allocator; hopper: an NVIDIA device from Hopper on.
    """

    known: dict[Any, Any]
    model: Model
    cluster: Cluster
    workload: Workload
    layout: Any
    stack: Stack
    precision: Precision
    shape: Shape
    micro_batches: Number
    shards: Number
    expert_shards: Number
    padded_vocab: Number
    on_cpu: bool
    hopper: bool

    @classmethod
    def of(cls, model: Model, cluster: Cluster, workload: Workload, layout: Layout | Any, stack: Stack) -> Run:
        """Work out what follows from the arguments.

        Columns become floats: they hold every whole number of bytes below 2^53, and divide faster than integers.
        """
        layout = _in_floats(layout)
        if workload.frozen != "none":
            stack = stack.variant(trained=workload.lora_targets)
        shape = Shape(
            batch=layout.micro_batch_size, seq_len=model.fixed_seq_len or workload.seq_len, cp=layout.cp, tp=layout.tp,
            sequence_parallel=layout.sequence_parallel,
        )  # fmt: skip
        dp = layout.dp_replicate * layout.dp_shard
        shards = layout.dp_shard * (layout.cp if stack.shards_over_cp else 1)
        padding = where(layout.vocab_padding > 0, layout.vocab_padding, stack.padded_vocab or 1)
        unit = padding * (layout.tp if stack.splits_embedding else 1)
        name = cluster.device.name.lower()
        return cls(
            known={}, model=model, cluster=cluster, workload=workload, layout=layout, stack=stack,
            precision=stack.precision(layout.precision), shape=shape,
            micro_batches=greater(1, floor_div(workload.global_batch_size, layout.micro_batch_size * dp)),
            shards=shards, expert_shards=greater(1, floor_div(shards, layout.ep)),
            padded_vocab=ceil_div(model.vocab_size, unit) * unit,
            on_cpu=name.startswith("cpu"), hopper=name.startswith(_FROM_HOPPER_ON),
        )  # fmt: skip

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element of an activation."""
        return BYTES[self.precision.compute]

    @property
    def tokens(self) -> Number:
        """Tokens of a micro-batch on a rank."""
        return self.shape.batch * self.shape.local_seq


def _in_floats(layout: Any) -> Any:
    """A layout of columns with its whole numbers as floats (booleans and words as they are); a `Layout` as it is."""
    if isinstance(layout, Layout):
        return layout
    fields = {f: getattr(layout, f) for f in Layout.__slots__}
    whole = {f: v.astype(np.float64) for f, v in fields.items() if isinstance(v, np.ndarray) and v.dtype.kind in "iu"}
    return SimpleNamespace(**{**fields, **whole})
