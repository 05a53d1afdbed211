"""Memory of a rank at its peak, term by term, for one layout or for columns of them.

The peak is the largest of a few events of a step (the loss, the start of a backward, its end, the optimizer step);
terms that exist at different events are never added. Everything is bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.layout import Layout
from loadmaster.describe.model import Model
from loadmaster.describe.stack import Alive, Stack
from loadmaster.describe.workload import Workload
from loadmaster.laws.allocator import reserved_beyond_live
from loadmaster.laws.in_flight import chunks_in_flight, per_chunk
from loadmaster.laws.kept import kept_terms
from loadmaster.laws.lines import state_lines, trained_params, whole_state
from loadmaster.laws.loss import loss_events
from loadmaster.laws.numbers import Number, greater, lesser, where
from loadmaster.laws.placement import Placement, place
from loadmaster.laws.recompute import backward_terms, last_backward_terms
from loadmaster.laws.run import Run
from loadmaster.laws.state import block_params, gathered_bytes, rank_params

__all__ = ["EVENTS", "OUTSIDE", "Peak", "memory_peak", "memory_terms", "memory_total"]

EVENTS = ("loss", "backward", "end of backward", "optimizer step")
OUTSIDE = ("context", "allocator/rounding")  # terms that are not live bytes of the framework's allocator
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
        return sum(self.terms.values())

    @property
    def allocated(self) -> Number:
        """Live bytes, as ``torch.cuda.max_memory_allocated`` counts them."""
        return sum(v for k, v in self.terms.items() if k not in OUTSIDE)

    @property
    def reserved(self) -> Number:
        """Bytes the caching allocator holds, as ``torch.cuda.max_memory_reserved`` counts them."""
        return self.total - self.terms.get("context", 0)


def memory_terms(
    model: Model, cluster: Cluster, workload: Workload, layout: Layout, stack: Stack, *, stage: int | str = "worst"
) -> Terms:
    """Bytes by term on a rank of pipeline stage `stage` at its peak; ``worst``: the stage where the sum is largest.

    ``layout`` is a `Layout`, or anything with its attribute names whose numbers are NumPy columns.

    >>> model, cluster = Model.from_hf("gpt2"), Cluster.parse("8xh100-sxm")
    >>> workload = Workload(global_batch_size=8, seq_len=1024)
    >>> terms = memory_terms(model, cluster, workload, Layout(dp_shard=8, zero=1), Stack.named("loadmaster"))
    >>> terms["parameters"] == 4 * model.num_params, terms["optimizer/exp_avg"] * 8 // 4 - model.num_params
    (True, 0)
    """
    return memory_peak(model, cluster, workload, layout, stack, stage=stage).terms


def memory_peak(
    model: Model, cluster: Cluster, workload: Workload, layout: Layout, stack: Stack, *, stage: int | str = "worst"
) -> Peak:
    """`memory_terms` with the event and the stage named."""
    run = Run.of(model, cluster, workload, layout, stack)
    stages = [int(stage)] if stage != "worst" else _stages(layout.pp)
    best, *others = [_Stage.of(run, index).peak(run) for index in stages]
    for other in others:
        best = _worse(best, other)
    return best


def memory_total(model: Model, cluster: Cluster, workload: Workload, layout: Layout, stack: Stack) -> Number:
    """The sum of `memory_terms` on the worst rank, without the terms: what a search needs of a million layouts."""
    run = Run.of(model, cluster, workload, layout, stack)
    best, *others = [_Stage.of(run, index).total(run) for index in _stages(layout.pp)]
    for other in others:
        best = greater(best, other)
    return best


def _stages(pp: Number) -> list[Number]:
    """The first, the second and the last stage, where there are any."""
    most = int(np.max(pp))
    return [0] if most == 1 else [0, pp - 1] if most == 2 else [0, lesser(pp - 1, 1), pp - 1]


def _worse(a: Peak, b: Peak) -> Peak:
    """Whichever is larger, element by element."""
    larger = b.total > a.total
    if not isinstance(larger, np.ndarray):
        return b if larger else a
    names = [*a.terms, *(n for n in b.terms if n not in a.terms)]
    terms = {n: np.where(larger, b.terms.get(n, 0), a.terms.get(n, 0)) for n in names}
    return Peak(terms=terms, event=np.where(larger, b.event, a.event), stage=np.where(larger, b.stage, a.stage))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """One stage: what exists throughout the step, and what each event adds, in parts that events share."""

    index: Number
    always: Terms
    kept: Terms
    outside: Terms
    events: tuple[tuple[str, tuple[Terms, ...]], ...]

    @classmethod
    def of(cls, run: Run, index: Number) -> _Stage:
        """Apply the laws of a stage."""
        layout = run.layout
        pipe = {"pp": layout.pp, "virtual_stages": layout.virtual_stages}
        placement = place(run.model, run.stack, stage=index, schedule=layout.schedule, **pipe)
        chunks = chunks_in_flight(layout.schedule, stage=index, micro_batches=run.micro_batches, **pipe)
        most = len(placement.chunks)
        kept = kept_terms(run, placement, per_chunk(layout.schedule, chunks, most=most, **pipe))
        left = per_chunk(layout.schedule, greater(chunks - layout.virtual_stages, 0), most=most, **pipe)
        params = rank_params(run, placement)
        gathered = {**_gathered(run, placement), "batch": run.tokens * 16}
        around = dict(gathered)
        trained = trained_params(run, placement, params)
        lazy = state_lines(run, trained, Alive.LAZY)
        later = where(run.micro_batches > 1, 1, 0)  # a second micro-batch finds the gradients of the first
        around.update({name: around.get(name, 0) + number * later for name, number in lazy.items()})
        end = (
            {**kept_terms(run, placement, left), **gathered, **lazy},
            state_lines(run, trained, Alive.BACKWARD),
            last_backward_terms(run, placement),
        )
        return cls(
            index=index, always=whole_state(run, params, placement), kept=kept, outside=_context(run),
            events=(
                *(("loss", (kept, around, terms)) for terms in loss_events(run, placement)),
                ("backward", (kept, around, backward_terms(run, placement))),
                ("end of backward", end),
                ("optimizer step", (lazy, state_lines(run, trained, Alive.STEP))),
            ),
        )  # fmt: skip

    def totals(self) -> list[Number]:
        """What each event adds; a part that several events share is summed once."""
        sums = {id(part): sum(part.values()) for _, parts in self.events for part in parts}
        return [sum(sums[id(part)] for part in parts) for _, parts in self.events]

    def total(self, run: Run) -> Number:
        """Bytes of the worst event."""
        *passes, step = self.totals()
        most = passes[0]
        for other in passes[1:]:
            most = greater(most, other)
        state = sum(self.always.values())
        beyond = reserved_beyond_live(run, state=state, step=step, passes=most, kept=self.kept)
        return state + greater(most, step) + beyond + sum(self.outside.values())

    def peak(self, run: Run) -> Peak:
        """The worst event, term by term."""
        totals = self.totals()
        terms = dict(self.always)
        names = [name for name, _ in self.events]
        if not any(isinstance(t, np.ndarray) for t in totals):
            worst = max(range(len(totals)), key=totals.__getitem__)
            for part in self.events[worst][1]:
                terms.update(part)
            event, most = names[worst], max(totals[:-1])
        else:
            index = np.argmax(np.stack(np.broadcast_arrays(*totals)), axis=0)
            for k, (_, parts) in enumerate(self.events):
                mask = index == k
                for name, number in (item for part in parts for item in part.items()):
                    terms[name] = terms.get(name, 0) + number * mask
            event, most = np.array(names)[index], np.max(np.stack(np.broadcast_arrays(*totals[:-1])), axis=0)
        rounding = reserved_beyond_live(
            run, state=sum(self.always.values()), step=totals[-1], passes=most, kept=self.kept
        )
        return Peak(terms={**terms, **self.outside, "allocator/rounding": rounding}, event=event, stage=self.index)


def _gathered(run: Run, placement: Placement) -> Terms:
    """Whole layers alive under ZeRO-3: the one at work, those prefetched, and the root unit."""
    layout = run.layout
    if not np.any(np.asarray(layout.zero) >= 3):
        return {}
    if run.stack.live_parameters:
        live = lesser(rank_params(run, placement).total, run.stack.live_parameters) * run.compute_bytes
        return {"buffers/all_gather": where((layout.zero >= 3) & (run.shards > 1), live, 0)}
    largest: Number = 0
    for block, count in placement.blocks:
        largest = greater(largest, where(count > 0, gathered_bytes(run, block), 0))
    root: Number = 0
    if run.stack.root_gathered:
        root = block_params(run, run.model.embedding).total * placement.embedding
        root = root + block_params(run, run.model.head).total * placement.head
    layers = lesser(run.stack.gathered_layers, placement.num_layers)
    if not run.stack.reshards_in_pipeline:
        layers = where(layout.pp > 1, placement.num_layers, layers)
    whole = largest * layers + root * run.compute_bytes
    return {"buffers/all_gather": where((layout.zero >= 3) & (run.shards > 1), whole, 0)}


def _context(run: Run) -> Terms:
    """What the device holds outside the framework's allocator; nothing on a CPU."""
    if run.on_cpu:
        return {"context": 0}
    layout = run.layout
    groups: Number = 0
    for degree in (layout.dp_shard, layout.dp_replicate, layout.tp, layout.pp, layout.cp, layout.ep):
        groups = groups + where(degree > 1, 1, 0)
    return {"context": run.stack.context.device + run.stack.context.communicator * groups}
