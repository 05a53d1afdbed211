"""Memory of a rank at its peak, term by term, for one layout or for columns of them.

The peak is the largest of a few events of a step (the loss, the start of a backward, its end, the optimizer step);
terms that exist at different events are never added. Everything is bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.layout import Layout
from loadmaster.describe.model import Block, Model
from loadmaster.describe.op import OpKind, Split
from loadmaster.describe.precision import BYTES, Precision
from loadmaster.describe.stack import Alive, Stack, StateLine
from loadmaster.describe.workload import OPTIMIZERS, Workload
from loadmaster.laws.activations import activation_polynomials, input_polynomial
from loadmaster.laws.in_flight import chunks_in_flight
from loadmaster.laws.numbers import Number, ceil_div, greater, lesser, where
from loadmaster.laws.placement import Placement, place
from loadmaster.laws.polynomial import Shape
from loadmaster.laws.state import Held, held, weight_classes
from loadmaster.laws.working_set import backward_transients

__all__ = ["EVENTS", "Peak", "memory_peak", "memory_terms"]

EVENTS = ("loss", "backward", "end of backward", "optimizer step")
Terms = dict[str, Number]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The worst moment of the worst rank.

    Attributes:
        terms: bytes by name; event: one of `EVENTS`; stage: pipeline rank (arrays where the layout is columns).
    """

    terms: Terms
    event: Any
    stage: Any

    @property
    def total(self) -> Number:
        """Sum of the terms."""
        return _total(self.terms)


def memory_terms(
    model: Model, cluster: Cluster, workload: Workload, layout: Layout, stack: Stack, *, stage: int | str = "worst"
) -> Terms:
    """Bytes by term on a rank of pipeline stage `stage` at its peak; ``worst``: the stage where the sum is largest."""
    return memory_peak(model, cluster, workload, layout, stack, stage=stage).terms


def memory_peak(
    model: Model, cluster: Cluster, workload: Workload, layout: Layout, stack: Stack, *, stage: int | str = "worst"
) -> Peak:
    """`memory_terms` with the event and the stage named."""
    run = _Run(model=model, cluster=cluster, workload=workload, layout=layout, stack=stack)
    if stage != "worst":
        return _peak_of_stage(run, int(stage))
    best = _peak_of_stage(run, 0)
    for candidate in _other_stages(layout):
        best = _worse(best, _peak_of_stage(run, candidate))
    return best


def _other_stages(layout: Any) -> list[Number]:
    """The second and the last stage, where there are any."""
    pp = layout.pp
    most = int(np.max(pp))
    if most == 1:
        return []
    return [pp - 1] if most == 2 else [lesser(pp - 1, 1), pp - 1]


def _worse(a: Peak, b: Peak) -> Peak:
    """Whichever is larger, element by element."""
    larger = b.total > a.total
    if not isinstance(larger, np.ndarray):
        return b if larger else a
    names = [*a.terms, *(n for n in b.terms if n not in a.terms)]
    terms = {n: np.where(larger, b.terms.get(n, 0), a.terms.get(n, 0)) for n in names}
    return Peak(terms=terms, event=np.where(larger, b.event, a.event), stage=np.where(larger, b.stage, a.stage))


def _total(terms: Terms) -> Number:
    return sum(terms.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The arguments of the law, and what follows from them at once."""

    model: Model
    cluster: Cluster
    workload: Workload
    layout: Any
    stack: Stack

    @property
    def precision(self) -> Precision:
        return self.stack.precision(self.layout.precision)

    @property
    def shape(self) -> Shape:
        layout = self.layout
        return Shape(
            batch=layout.micro_batch_size, seq_len=self.model.fixed_seq_len or self.workload.seq_len, cp=layout.cp,
            tp=layout.tp, sequence_parallel=layout.sequence_parallel,
        )  # fmt: skip

    @property
    def micro_batches(self) -> Number:
        layout = self.layout
        dp = layout.dp_replicate * layout.dp_shard
        return greater(1, self.workload.global_batch_size // (layout.micro_batch_size * dp))

    @property
    def shards(self) -> Number:
        return self.layout.dp_shard * (self.layout.cp if self.stack.shards_over_cp else 1)

    @property
    def padded_vocab(self) -> Number:
        """Rows of the vocabulary tables, padded as the layout or else the stack says."""
        padding = self.layout.vocab_padding
        unit = where(padding > 0, padding, self.stack.padded_vocab or 1)
        unit = unit * (self.layout.tp if self.stack.splits_embedding else 1)
        return ceil_div(self.model.vocab_size, unit) * unit


def _peak_of_stage(run: _Run, stage: Number) -> Peak:
    """The largest event of one stage."""
    layout = run.layout
    placement = place(
        run.model, run.stack, pp=layout.pp, stage=stage, virtual_stages=layout.virtual_stages, schedule=layout.schedule
    )
    chunks = chunks_in_flight(
        layout.schedule, pp=layout.pp, stage=stage, virtual_stages=layout.virtual_stages,
        micro_batches=run.micro_batches,
    )  # fmt: skip
    params = _params(run, placement)
    always = _state(run, params, placement)
    kept = _activations(run, placement, chunks)
    outside = _context(run)
    best: Peak | None = None
    for event, terms in _events(run, placement, params, kept, chunks):
        everything = {**always, **terms, **outside}
        everything["allocator/rounding"] = _allocator(run, always, terms)
        peak = Peak(terms=everything, event=event, stage=stage)
        best = peak if best is None else _worse(best, peak)
    assert best is not None
    return best


def _params(run: _Run, placement: Placement, *, trainable: bool = False) -> Held:
    """Parameters on the rank before sharding over data ranks."""
    total: Held = Held()
    for block, count in placement.blocks:
        total = total + _block_params(run, block, trainable=trainable) * count
    ends = _block_params(run, run.model.embedding, trainable=trainable) * placement.embedding
    head = _block_params(run, run.model.head, trainable=trainable) * placement.head
    apart = placement.head - placement.head * placement.embedding  # a tied matrix has its own copy on another stage
    both = _block_params(run, run.model.head, trainable=trainable, with_tied=True) * apart
    own = Held(dense=head.dense * where(apart > 0, 0, 1), expert=head.expert)
    result: Held = total + ends + own + both
    return result


def _block_params(run: _Run, block: Block, *, trainable: bool = False, with_tied: bool = False) -> Held:
    layout = run.layout
    return held(
        weight_classes(block, run.model.vocab_size, with_tied), tp=layout.tp, ep=layout.ep, expert_tp=layout.tp,
        padded_vocab=run.padded_vocab, splits_vocab=run.stack.splits_embedding, trainable=trainable,
    )  # fmt: skip


def _line_bytes(run: _Run, line: StateLine, params: Held) -> Number:
    """Bytes of one line of state on the rank."""
    layout = run.layout
    each: Number = line.bytes_each(run.precision)
    if line.term.startswith("optimizer/exp") and run.workload.optimizer not in ("adamw", "adam"):
        each = each if _moments(run.workload.optimizer) and line.term.endswith("exp_avg") else 0
    if not each or (line.dtype == "master" and run.precision.master is None):
        return 0
    sharded = params.sharded(run.shards, greater(1, run.shards // layout.ep))
    whole = params.total
    if line.zero is not None:
        whole = where(layout.zero >= line.zero, sharded, whole)
    return whole * each * _condition(run, line.when)


def _moments(optimizer: str) -> int:
    return OPTIMIZERS[optimizer]


def _condition(run: _Run, when: str) -> Number:
    """1 where the line exists, else 0."""
    layout = run.layout
    tests = {
        "zero0": lambda: where(layout.zero == 0, 1, 0),
        "zero1": lambda: where((layout.zero >= 1) & (run.shards > 1), 1, 0),
        "replicas": lambda: where(layout.dp_replicate * layout.dp_shard > 1, 1, 0),
    }
    found: Number = 1
    for name in filter(None, when.split("+")):
        found = found * tests[name]()
    return found


def _state(run: _Run, params: Held, placement: Placement) -> Terms:
    """Lines that always exist."""
    terms: Terms = {}
    for line in run.stack.state:
        if line.alive is Alive.ALWAYS:
            terms[line.term] = terms.get(line.term, 0) + _line_bytes(run, line, params)
    if run.stack.retains_unsharded:
        whole = params.total * BYTES[run.precision.reduce]
        retained = (run.layout.zero >= 2) & (run.micro_batches > 1) & (run.layout.reduce_each_micro_batch == 0)
        terms["gradients"] = where(retained, greater(whole, terms["gradients"]), terms["gradients"])
    if run.stack.scratch_gradients:
        terms["buffers/weight_gradients"] = _scratch(run, placement)
    return terms


def _scratch(run: _Run, placement: Placement) -> Number:
    """One weight-gradient tensor for each distinct matrix shape of the rank's blocks (one expert stands for all)."""
    total: Number = 0
    seen: set[tuple[int, ...]] = set()
    for block, count in placement.blocks:
        for shape, numel, split in _matrices(block):
            if shape in seen:
                continue
            seen.add(shape)
            part = ceil_div(numel, run.layout.tp) if split else numel
            total = total + part * where(count > 0, 1, 0)
    return total * BYTES[run.precision.compute]


@lru_cache(maxsize=4096)
def _matrices(block: Block) -> tuple[tuple[tuple[int, ...], int, bool], ...]:
    """(shape, elements, split) of the block's matrices; those that read one value are one fused matrix."""
    fused: dict[str, list[Any]] = {}
    for op in block.ops:
        for weight in op.weights:
            if weight.multiplies and op.kind is OpKind.MATMUL:
                row = fused.setdefault(f"{op.inputs[0]}/{weight.split_dim}", [0, weight.shape[1 - weight.split_dim], 0,
                                                                              weight.split is Split.TP])  # fmt: skip
                row[0] += weight.shape[weight.split_dim]
                row[2] += math.prod(weight.shape)
    return tuple(((rows, columns), numel, split) for rows, columns, numel, split in fused.values())


def _activations(run: _Run, placement: Placement, chunks: Number) -> Terms:
    """Saved tensors of all micro-batches in flight: each chunk holds its share of the rank's layers."""
    layout, shape = run.layout, run.shape
    terms: Terms = {}
    for block, count in placement.blocks:
        recomputed = _recomputed(run, placement, count)
        for term, number in _block_activations(run, block).items():
            terms[term] = terms.get(term, 0) + (count - recomputed) * number
        terms["activations/checkpoint"] = terms.get("activations/checkpoint", 0) + recomputed * input_polynomial(
            block, run.precision
        )(shape)
    for term, number in _block_activations(run, run.model.embedding).items():
        terms[term] = terms.get(term, 0) + placement.embedding * number
    scaled = {n: ceil_div(t * chunks, layout.virtual_stages) for n, t in terms.items()}
    for term, number in _block_activations(run, run.model.head).items():
        scaled[term] = scaled.get(term, 0) + placement.head * number
    return scaled


def _recomputed(run: _Run, placement: Placement, count: Number) -> Number:
    """Layers, of `count` of one kind on this rank, that keep only their input."""
    match run.layout.recompute:
        case "full":
            return count
        case "blocks":
            share = lesser(run.layout.recompute_blocks, placement.num_layers)
            return lesser(count, share)
        case _:
            return 0


def _block_activations(run: _Run, block: Block) -> Terms:
    selective = run.layout.recompute == "selective"
    terms: Terms = {}
    for term, _, polynomial in activation_polynomials(block, run.stack, run.precision, selective):
        terms[term] = terms.get(term, 0) + polynomial(run.shape)
    return terms


def _events(run: _Run, placement: Placement, params: Held, kept: Terms, chunks: Number) -> list[tuple[str, Terms]]:
    """What each event adds to the state."""
    gathered = _gathered(run, placement)
    one = _one_micro_batch(kept, chunks, run.layout.virtual_stages)
    batch = {"batch": run.shape.batch * run.shape.local_seq * 16}
    losses = [("loss", {**kept, **batch, **gathered, **terms}) for terms in _loss_events(run, placement)]
    return [
        *losses,
        ("backward", {**kept, **batch, **gathered, **_backward(run, placement)}),
        ("end of backward", {**one, **batch, **gathered, **_lines(run, params, Alive.BACKWARD)}),
        ("optimizer step", {**batch, **_lines(run, params, Alive.STEP)}),
    ]


def _one_micro_batch(kept: Terms, chunks: Number, virtual_stages: Number) -> Terms:
    """Activations of the others when one micro-batch has been through its backward."""
    left = greater(chunks - virtual_stages, 0)
    return {name: number * left // greater(chunks, 1) for name, number in kept.items()}


def _lines(run: _Run, params: Held, alive: Alive) -> Terms:
    terms: Terms = {}
    for line in run.stack.state:
        if line.alive is alive:
            terms[line.term] = terms.get(line.term, 0) + _line_bytes(run, line, params)
    return terms


def _gathered(run: _Run, placement: Placement) -> Terms:
    """Whole layers alive under ZeRO-3: the one at work, those prefetched, and the root unit."""
    layout = run.layout
    if not np.any(np.asarray(layout.zero) >= 3):
        return {}
    largest: Number = 0
    for block, count in placement.blocks:
        largest = greater(largest, where(count > 0, _block_params(run, block).total, 0))
    root: Number = 0
    if run.stack.root_gathered:
        root = _block_params(run, run.model.embedding).total * placement.embedding
        root = root + _block_params(run, run.model.head).total * placement.head
    size = BYTES[run.precision.compute]
    held_layers = lesser(run.stack.gathered_layers, placement.num_layers)
    whole = (largest * held_layers + root) * size
    return {"buffers/all_gather": where((layout.zero >= 3) & (run.shards > 1), whole, 0)}


def _loss_events(run: _Run, placement: Placement) -> list[Terms]:
    """The loss's forward or backward, and the backward of the head's product."""
    shape, precision, stack = run.shape, run.precision, run.stack
    if not any(op.kind is OpKind.LOSS for op in run.model.head.ops):
        return [{}]
    forward, backward, head = _loss_bytes(stack, precision, run.workload.loss)
    elements = shape.batch * shape.local_seq * run.padded_vocab
    if stack.splits_vocab:
        elements = ceil_div(elements, run.layout.tp)
    elements = elements * placement.head
    stream = shape.batch * shape.local_seq * run.model.hidden_size * BYTES[precision.compute]
    streams = stream * max(1, stack.head_streams) * placement.head
    matrix = _block_params(run, run.model.head, with_tied=True).total * placement.head * _half_gradient(run)
    return [
        {"logits": elements * max(forward, backward), "transient": stream * stack.head_streams * placement.head},
        {"logits": elements * head, "transient": streams + matrix},
    ]


def _half_gradient(run: _Run) -> int:
    """Bytes of a weight gradient as the product's kernel writes it, before it reaches what the stack keeps."""
    return BYTES[run.precision.compute]


@lru_cache(maxsize=256)
def _loss_bytes(stack: Stack, precision: Precision, loss: str) -> tuple[int, int, int]:
    """Bytes a logit in the loss's forward, in its backward, in the head's backward."""
    low = BYTES[precision.compute] < 4
    sums = [0, 0, 0]
    for tensor in stack.loss_tensors(loss):
        if tensor.low_only and not low:
            continue
        size = BYTES[precision.compute if tensor.dtype == "compute" else tensor.dtype]
        for k, alive in enumerate((tensor.forward, tensor.backward, tensor.head)):
            sums[k] += size * alive
    return sums[0], sums[1], sums[2]


def _backward(run: _Run, placement: Placement) -> Terms:
    """The working set of a block's backward; with recompute, the block's own tensors once more."""
    transient: Number = 0
    again: Number = 0
    for block, count in placement.blocks:
        present = where(count > 0, 1, 0)
        worst: Number = 0
        for polynomial in backward_transients(block, run.stack, run.precision):
            worst = greater(worst, polynomial(run.shape))
        transient = greater(transient, worst * present)
        if run.layout.recompute in ("full", "blocks"):
            whole = _total(_block_activations(run, block)) - input_polynomial(block, run.precision)(run.shape)
            again = greater(again, whole * present)
    if run.layout.recompute == "blocks":
        again = where(run.layout.recompute_blocks > 0, again, 0)
    return {"transient": transient, "activations/recomputed": again}


def _context(run: _Run) -> Terms:
    """What the device holds outside the framework's allocator; nothing on a CPU."""
    if run.cluster.device.name.lower().startswith("cpu"):
        return {"context": 0}
    layout = run.layout
    groups: Number = 0
    for degree in (layout.dp_shard, layout.dp_replicate, layout.tp, layout.pp, layout.cp, layout.ep):
        groups = groups + where(degree > 1, 1, 0)
    return {"context": run.stack.context.device + run.stack.context.communicator * groups}


def _allocator(run: _Run, always: Terms, terms: Terms) -> Number:
    """Bytes reserved beyond the live ones."""
    if run.cluster.device.name.lower().startswith("cpu"):
        return 0
    rule = run.stack.allocator
    share = _total(always) * rule.state + _total(terms) * rule.activations
    whole = np.ceil(share) if isinstance(share, np.ndarray) else int(np.ceil(share))
    return whole + rule.fixed
