"""The bucket table: which flat buffer holds a parameter's gradient, at which offset, in gradient-ready order.

A bucket is one flat buffer, padded so that `num_shards` ranks own equal chunks. Every parameter starts at a multiple
of `ALIGNMENT` elements and every chunk is one long, so a rank's share of a tensor is cut at multiples of `ALIGNMENT`
elements from the tensor's start, whatever the number of ranks: 8-bit state is scaled in blocks of that size, and its
grid must not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import lcm
from typing import Any

from loadmaster.describe.precision import BYTES, Precision
from loadmaster.program.params import HEAD, Parameter, ParameterTable

__all__ = ["ALIGNMENT", "Bucket", "Entry", "bucket_table", "buckets_of", "stage_in_force", "unit_table"]

ALIGNMENT = 256  # elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A parameter's place in a bucket, in elements."""

    name: str
    offset: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One flat buffer.

    Attributes:
        index: position in the table; gradients become ready about in this order.
        entries: parameters in it, ascending offsets.
        numel: elements with padding, a multiple of num_shards * lcm(ALIGNMENT, num_replicas).
        num_shards: ranks that own a chunk each.
        unit: the layer that is gathered as one (ZeRO stage 3), None elsewhere.
        trainable: it has gradients (frozen parameters are in a bucket only to be gathered).
        group: as `Parameter.group`.

    >>> rows = [Parameter(name="a", shape=(1001,)), Parameter(name="b", shape=(7, 13))]
    >>> bucket = make_bucket(0, rows, num_shards=4)
    >>> [(e.name, e.offset) for e in bucket.entries], bucket.numel, bucket.chunk
    ([('a', 0), ('b', 1024)], 2048, 512)
    """

    index: int
    entries: tuple[Entry, ...]
    numel: int
    num_shards: int
    unit: int | None = None
    trainable: bool = True
    group: str = ""

    @property
    def chunk(self) -> int:
        """Elements a rank owns, padding included."""
        return self.numel // self.num_shards

    @property
    def num_params(self) -> int:
        """Elements without padding."""
        return sum(entry.numel for entry in self.entries)


def make_bucket(
    index: int,
    rows: Sequence[Parameter],
    *,
    num_shards: int,
    num_replicas: int = 1,
    unit: int | None = None,
    trainable: bool = True,
) -> Bucket:
    """Lay `rows` one after another and pad the end."""
    entries, offset = [], 0
    for row in rows:
        entries.append(Entry(name=row.name, offset=offset, numel=row.numel))
        offset += _round_up(row.numel, ALIGNMENT)
    return Bucket(
        index=index, entries=tuple(entries), numel=_round_up(offset, lcm(ALIGNMENT, num_replicas) * num_shards),
        num_shards=num_shards, unit=unit, trainable=trainable, group=rows[0].group,
    )  # fmt: skip


def stage_in_force(layout: Any) -> int:
    """ZeRO stage that acts: 0 where there is nothing to shard over."""
    return layout.zero if layout.dp_shard > 1 else 0


def buckets_of(params: ParameterTable, layout: Any) -> tuple[Bucket, ...]:
    """The flat buffers of a layout: what the runtime allocates and the laws count.

    >>> from loadmaster.describe.layout import Layout
    >>> table = ParameterTable.from_named([("a", (1000,), 0, True), ("b", (1000,), 1, True)])
    >>> [b.numel for b in buckets_of(table, Layout(dp_shard=4, zero=3))]
    [1024, 1024]
    """
    shards, replicas = layout.dp_shard, layout.dp_replicate
    if stage_in_force(layout) == 3:
        return unit_table(params, num_shards=shards, num_replicas=replicas)
    element = BYTES[Precision.named(layout.precision).grad]
    return bucket_table(
        params, bucket_bytes=layout.bucket_bytes, element_bytes=element, num_shards=shards, num_replicas=replicas
    )


def bucket_table(
    params: ParameterTable, *, bucket_bytes: int, element_bytes: int, num_shards: int, num_replicas: int = 1
) -> tuple[Bucket, ...]:
    """Trainable parameters in reverse order of the forward, closed when the next would exceed `bucket_bytes`.

    A parameter larger than that has a bucket to itself. Parameters of different groups never share one.

    >>> table = ParameterTable.from_named([(n, (1024,), 0, True) for n in "abc"])
    >>> [[e.name for e in b.entries] for b in bucket_table(table, bucket_bytes=8192, element_bytes=4, num_shards=1)]
    [['c', 'b'], ['a']]
    """
    buckets: list[Bucket] = []
    cap = max(bucket_bytes // element_bytes, 1)
    open_rows: dict[str, list[Parameter]] = {}
    for row in sorted(params.trained, key=_forward_key, reverse=True):
        rows = open_rows.setdefault(row.group, [])
        if rows and sum(_round_up(r.numel, ALIGNMENT) for r in rows) + row.numel > cap:
            buckets.append(make_bucket(len(buckets), rows, num_shards=num_shards, num_replicas=num_replicas))
            rows = open_rows[row.group] = []
        rows.append(row)
    for rows in open_rows.values():
        buckets.append(make_bucket(len(buckets), rows, num_shards=num_shards, num_replicas=num_replicas))
    return tuple(buckets)


def unit_table(params: ParameterTable, *, num_shards: int, num_replicas: int = 1) -> tuple[Bucket, ...]:
    """ZeRO stage 3: one bucket a layer, group and trainability; what lies outside the blocks is one unit, the last.

    Layers come in reverse order of the forward, as their gradients do.

    >>> table = ParameterTable.from_named([("e", (8,), -1, True), ("x", (8,), 0, True), ("y", (8,), 1, False)])
    >>> [(b.unit, b.trainable, [e.name for e in b.entries]) for b in unit_table(table, num_shards=2)]
    [(1, False, ['y']), (0, True, ['x']), (-1, True, ['e'])]
    """
    keyed = sorted(params.stored, key=lambda row: (*_unit_key(row), _forward_key(row)))
    buckets: list[Bucket] = []
    for (unit, trainable, _), rows in groupby(keyed, key=lambda r: (_unit(r), r.trainable, r.group)):
        buckets.append(
            make_bucket(len(buckets), list(rows), num_shards=num_shards, num_replicas=num_replicas, unit=unit,
                        trainable=trainable)
        )  # fmt: skip
    return tuple(buckets)


def num_elements(buckets: Iterable[Bucket]) -> int:
    """Elements of all buckets, padding included."""
    return sum(bucket.numel for bucket in buckets)


def _forward_key(row: Parameter) -> tuple[int, str]:
    """Layers in forward order, by name inside: a described model and a real module then agree on the table."""
    return (1 << 30 if row.layer == HEAD else row.layer), row.name


def _unit(row: Parameter) -> int:
    return max(row.layer, -1)


def _unit_key(row: Parameter) -> tuple[int, bool, str]:
    return -_unit(row), row.trainable, row.group


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
