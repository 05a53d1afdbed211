"""Every rule that a layout must keep towards a model, a workload and a cluster, stated once.

A rule is a function over one layout or over columns of layouts: `check` raises for one layout, naming the nearest
legal values; `broken` gives the planner one boolean column a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.layout import Layout
from loadmaster.describe.model import Model
from loadmaster.describe.workload import Workload
from loadmaster.errors import InvalidInput
from loadmaster.program.dimensions import Dimensions, padded_vocab

__all__ = ["RULES", "Rule", "broken", "check", "explain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What a rule looks at; `layout` is a Layout or columns with its attribute names."""

    dims: Dimensions
    layout: Any
    workload: Workload
    cluster: Cluster | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule.

    Attributes:
        name: stable, as in a rejection.
        field: the field of the layout to change.
        broken: True where the rule is broken; broadcasts over the layout's columns.
        says: what must hold, for a person, of one layout.
    """

    name: str
    field: str
    broken: Callable[[_Case], Any]
    says: Callable[[_Case], str]


def _indivisible(numbers: tuple[int, ...], degree: Any) -> Any:
    """Whether `degree` fails to divide one of `numbers`."""
    result = np.zeros(np.shape(degree), dtype=bool)
    for number in numbers:
        result = result | (number % degree != 0)
    return result


def _kv_broken(case: _Case) -> Any:
    tp = case.layout.tp
    result = np.zeros(np.shape(tp), dtype=bool)
    for kv in case.dims.kv_heads:
        replicated = case.layout.replicate_kv_heads & (tp % kv == 0)
        result = result | ((kv % tp != 0) & ~np.asarray(replicated, dtype=bool))
    return result


def _micro_batches(case: _Case) -> Any:
    unit = case.layout.dp_replicate * case.layout.dp_shard * case.layout.micro_batch_size
    return case.workload.global_batch_size / unit


def _schedule_is(case: _Case, *names: str) -> Any:
    return np.isin(case.layout.schedule, names)


def _world(layout: Any) -> Any:
    return layout.dp_replicate * layout.dp_shard * layout.tp * layout.pp * layout.cp


def _counts(numbers: tuple[int, ...]) -> str:
    return " and ".join(map(str, numbers))


RULES: tuple[Rule, ...] = (
    Rule(
        name="a traced module is not split", field="tp",
        broken=lambda c: c.dims.traced & ((np.asarray(c.layout.tp) > 1) | (np.asarray(c.layout.cp) > 1)),
        says=lambda c: "must be 1, and cp too: a traced module does not say how its matrices or sequences are split",
    ),
    Rule(
        name="tp divides the attention heads", field="tp",
        broken=lambda c: _indivisible(c.dims.heads, c.layout.tp),
        says=lambda c: f"must divide the {_counts(c.dims.heads)} attention heads "
        f"({', '.join(f'{h} % {c.layout.tp} = {h % c.layout.tp}' for h in c.dims.heads)})",
    ),
    Rule(
        name="tp divides the KV heads", field="tp",
        broken=_kv_broken,
        says=lambda c: f"must divide the {_counts(c.dims.kv_heads)} KV heads, or be a multiple of them with "
        "replicate_kv_heads",
    ),
    Rule(
        name="tp divides the widths", field="tp",
        broken=lambda c: _indivisible(c.dims.widths, c.layout.tp),
        says=lambda c: f"must divide the widths {_counts(c.dims.widths)} of the blocks' matrices",
    ),
    Rule(
        name="tp divides the vocabulary", field="tp",
        broken=lambda c: (np.asarray(c.layout.vocab_padding) == 1) & (c.dims.vocab_size % c.layout.tp != 0),
        says=lambda c: f"must divide the vocabulary, and {c.dims.vocab_size} % {c.layout.tp} = "
        f"{c.dims.vocab_size % c.layout.tp}; padding is off (vocab_padding=1), "
        f"vocab_padding=0 pads it to {padded_vocab(c.dims.vocab_size, c.layout.tp)}",
    ),
    Rule(
        name="every stage has a layer", field="pp",
        broken=lambda c: c.layout.pp * c.layout.virtual_stages > np.maximum(c.dims.num_layers, 1),
        says=lambda c: f"times virtual_stages={c.layout.virtual_stages} must not exceed the {c.dims.num_layers} layers",
    ),
    Rule(
        name="the schedule has that many virtual stages", field="virtual_stages",
        broken=lambda c: (np.asarray(c.layout.pp) > 1) & (
            ((np.asarray(c.layout.virtual_stages) > 1) & _schedule_is(c, "gpipe", "1f1b", "zb_h1"))
            | ((np.asarray(c.layout.virtual_stages) != 2) & _schedule_is(c, "zb_v", "dualpipe_v"))
            | ((np.asarray(c.layout.virtual_stages) < 2) & _schedule_is(c, "interleaved_1f1b"))
        ),
        says=lambda c: f"does not go with schedule {c.layout.schedule}: 1 for gpipe, 1f1b and zb_h1, "
        "2 for zb_v and dualpipe_v, 2 or more for interleaved_1f1b",
    ),
    Rule(
        name="interleaving takes micro-batches in rounds of pp", field="pp",
        broken=lambda c: _schedule_is(c, "interleaved_1f1b") & (np.asarray(c.layout.pp) > 1)
        & (_micro_batches(c) % c.layout.pp != 0),
        says=lambda c: f"must divide the {_micro_batches(c):g} micro-batches under interleaved_1f1b",
    ),
    Rule(
        name="dualpipe_v needs two micro-batches a stage", field="pp",
        broken=lambda c: _schedule_is(c, "dualpipe_v") & (_micro_batches(c) < 2 * np.asarray(c.layout.pp)),
        says=lambda c: f"may be at most half the {_micro_batches(c):g} micro-batches under dualpipe_v",
    ),
    Rule(
        name="a stage has the blocks to recompute", field="recompute_blocks",
        broken=lambda c: np.asarray(c.layout.recompute_blocks)
        > -(-c.dims.num_layers // (c.layout.pp * c.layout.virtual_stages)) * c.layout.virtual_stages,
        says=lambda c: f"must be at most the {-(-c.dims.num_layers // c.layout.pp)} blocks of a rank",
    ),
    Rule(
        name="the model has experts", field="ep",
        broken=lambda c: (np.asarray(c.layout.ep) > 1) & (len(c.dims.experts) == 0),
        says=lambda c: "needs a model with experts, and this one is dense",
    ),
    Rule(
        name="ep divides the experts", field="ep",
        broken=lambda c: _indivisible(c.dims.experts, c.layout.ep),
        says=lambda c: f"must divide the {_counts(c.dims.experts)} experts",
    ),
    Rule(
        name="experts lie inside the data ranks", field="ep",
        broken=lambda c: (c.layout.dp_replicate * c.layout.dp_shard * c.layout.cp) % c.layout.ep != 0,
        says=lambda c: f"must divide dp_replicate * dp_shard * cp = "
        f"{c.layout.dp_replicate * c.layout.dp_shard * c.layout.cp}",
    ),
    Rule(
        name="cp divides the sequence", field="cp",
        broken=lambda c: (np.asarray(c.layout.cp) > 1) & (c.workload.seq_len % (2 * c.layout.cp) != 0),
        says=lambda c: f"must divide half the sequence of {c.workload.seq_len} tokens (each rank holds two slices, "
        "one from each end, so that causal work is even)",
    ),
    Rule(
        name="sequence parallel divides the sequence", field="tp",
        broken=lambda c: np.asarray(c.layout.sequence_parallel)
        & (c.workload.seq_len % (c.layout.cp * c.layout.tp) != 0),
        says=lambda c: f"times cp={c.layout.cp} must divide the sequence of {c.workload.seq_len} tokens "
        "under sequence_parallel",
    ),
    Rule(
        name="the degrees use every device", field="dp_shard",
        broken=lambda c: False if c.cluster is None else _world(c.layout) != c.cluster.num_devices,
        says=lambda c: f"times dp_replicate * tp * pp * cp must be the {c.cluster.num_devices if c.cluster else 0} "
        f"devices of the cluster, and all degrees multiply to {_world(c.layout)}",
    ),
    Rule(
        name="micro-batches reach the global batch", field="micro_batch_size",
        broken=lambda c: c.workload.global_batch_size
        % (c.layout.dp_replicate * c.layout.dp_shard * c.layout.micro_batch_size) != 0,
        says=lambda c: "times the data ranks must divide the global batch",
    ),
    Rule(
        name="the positions reach the sequence", field="seq_len",
        broken=lambda c: np.broadcast_to(
            c.dims.max_seq_len is not None and c.workload.seq_len > c.dims.max_seq_len, np.shape(c.layout.tp)
        ),
        says=lambda c: f"exceeds the {c.dims.max_seq_len} positions of the model",
    ),
)  # fmt: skip


def broken(dims: Dimensions, workload: Workload, columns: Any, cluster: Cluster | None = None) -> Mapping[str, Any]:
    """For each rule, by name, where `columns` break it (a boolean column each)."""
    case = _Case(dims=dims, layout=columns, workload=workload, cluster=cluster)
    return {rule.name: rule.broken(case) for rule in RULES}


def check(model: Model | Dimensions, workload: Workload, layout: Layout, cluster: Cluster | None = None) -> None:
    """Raise for the first rule that one layout breaks.

    Raises:
        InvalidInput: with the field, what must hold and the nearest values that are legal.
    """
    dims = model if isinstance(model, Dimensions) else Dimensions.of(model)
    case = _Case(dims=dims, layout=layout, workload=workload, cluster=cluster)
    for rule in RULES:
        if bool(rule.broken(case)):
            raise explain(rule, dims, workload, layout, cluster)


def explain(
    rule: Rule, dims: Dimensions, workload: Workload, layout: Layout, cluster: Cluster | None = None
) -> InvalidInput:
    """The refusal of a layout that breaks `rule`."""
    case = _Case(dims=dims, layout=layout, workload=workload, cluster=cluster)
    if rule.field == "micro_batch_size":
        return _batch_refusal(workload, layout, cluster)
    if rule.field == "seq_len":
        return InvalidInput(
            "workload.seq_len", workload.seq_len, rule.says(case), f"use at most {dims.max_seq_len} tokens a sequence"
        )
    value = getattr(layout, rule.field)
    legal = _legal_values(rule, case)
    near = [v for v in legal if v < value][-3:] + [v for v in legal if v > value][:2]
    way_out = f"use {rule.field} = {' or '.join(map(str, near))}" if near else "change the other degrees"
    multiples = all(layout.tp % kv == 0 for kv in dims.kv_heads if kv % layout.tp)
    if rule.name == "tp divides the KV heads" and multiples and not layout.replicate_kv_heads:
        way_out += ", or replicate_kv_heads=true"
    return InvalidInput(f"layout.{rule.field}", value, rule.says(case), way_out)


def _legal_values(rule: Rule, case: _Case) -> list[int]:
    """Values of the rule's field, the others held, that keep it and every other rule about the same field."""
    dims = case.dims
    limit = max(64, 2 * int(getattr(case.layout, rule.field)), *dims.heads, *dims.experts, dims.num_layers)
    if case.cluster is not None:
        limit = max(limit, case.cluster.num_devices)
    values = np.arange(1, min(limit, 1 << 20) + 1)
    tried = _Case(
        dims=dims, layout=_With(case.layout, rule.field, values), workload=case.workload, cluster=case.cluster
    )
    bad = np.zeros(values.shape, dtype=bool)
    for other in RULES:
        if other.field == rule.field:
            bad = bad | other.broken(tried)
    return [int(v) for v in values[~bad]]


class _With:
    """A layout with one field replaced by a column of values."""

    def __init__(self, layout: Layout, field: str, values: Any) -> None:
        self._layout, self._field, self._values = layout, field, values

    def __getattr__(self, name: str) -> Any:
        return self._values if name == self._field else getattr(self._layout, name)


def _batch_refusal(workload: Workload, layout: Layout, cluster: Cluster | None) -> InvalidInput:
    """The global batches, micro-batches and data ranks next to the one refused."""
    batch, unit = workload.global_batch_size, layout.dp * layout.micro_batch_size
    count = batch // unit
    near = [n * unit for n in (count, count + 1) if n]
    sizes = (
        [b for b in range(1, batch // layout.dp + 1) if batch % (layout.dp * b) == 0] if batch % layout.dp == 0 else []
    )
    ranks = [d for d in range(1, 2 * layout.dp + 1) if batch % (d * layout.micro_batch_size) == 0 and d != layout.dp]
    close = sorted(ranks, key=lambda d: (abs(d - layout.dp), -d))[:2]
    ways = [f"a global batch of {' or '.join(map(str, near))}"]
    if sizes:
        ways.append(f"micro_batch_size = {min(sizes, key=lambda b: abs(b - layout.micro_batch_size))}")
    if close:
        others = layout.world_size // layout.dp
        ways.append(
            " or ".join(f"{d * others} devices ({batch // (d * layout.micro_batch_size)} micro-batches)" for d in close)
        )
    return InvalidInput(
        "workload.global_batch_size", batch,
        f"is not micro_batch_size * micro-batches * dp = {layout.micro_batch_size} * n * {layout.dp}",
        f"use {', '.join(ways)}",
    )  # fmt: skip
