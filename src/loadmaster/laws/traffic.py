"""Bytes and messages that the busiest rank sends in a step, by mesh axis and collective; exact, padding included.

Over n ranks a reduce-scatter or an all-gather of a buffer of B bytes sends

    (n - 1) / n * B bytes in n - 1 messages,

an all-reduce twice that (Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69, theorem 1, is the lower bound). Sums
are cut into pieces, which adds messages and no bytes. Gloo's own reduce_scatter moves an all-reduce's bytes.

What travels over dp_shard in a window of m micro-batches on the busiest rank, G gradient and P weight bytes:

    stage 0     reduce-scatter G, all-gather G
    stage 1     reduce-scatter G (m times where reduced after each micro-batch), all-gather P
    stage 2     reduce-scatter m G, all-gather P
    stage 3     reduce-scatter m G; all-gather m (2 L - 1) / L of the blocks' P (the last block stays gathered between
                its forward and its backward) and once the P outside the blocks
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from loadmaster.describe.layout import Layout
from loadmaster.describe.model import Model
from loadmaster.describe.op import OpKind
from loadmaster.describe.precision import BYTES, Precision
from loadmaster.describe.workload import Workload
from loadmaster.ledger import Ledger
from loadmaster.program.buckets import Bucket, buckets_of, stage_in_force
from loadmaster.program.params import EMBEDDING, ParameterTable
from loadmaster.program.ring import Algorithm, piece_elements
from loadmaster.program.window import reductions

__all__ = ["Traffic", "data_traffic", "traffic_terms"]

# fp64 numbers of the two exchanges of a step: (count, micro-batches) and (squares, loss, count, unused parameters)
CONTROL_NUMBERS = (2, 4)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes and messages by term."""

    bytes: Ledger
    messages: Ledger


class _Sums:
    """Adds collectives up as one rank sends them."""

    def __init__(self, *, gloo_backend: bool) -> None:
        self.gloo_backend = gloo_backend
        self.num_bytes: dict[str, int] = {}
        self.num_messages: dict[str, int] = {}

    def add(self, term: str, num_bytes: int, messages: int) -> None:
        if num_bytes:
            self.num_bytes[term] = self.num_bytes.get(term, 0) + num_bytes
            self.num_messages[term] = self.num_messages.get(term, 0) + messages

    def gather(self, axis: str, n: int, elements: int, element_bytes: int, *, times: int = 1) -> None:
        self.add(f"{axis}/all_gather", times * (n - 1) * (elements // n) * element_bytes, times * (n - 1))


def data_traffic(
    buckets: Sequence[Bucket], layout: Layout, *, micro_batches: int, algorithm: Algorithm = Algorithm.DIRECT,
    backend: str = "gloo",
) -> Traffic:  # fmt: skip
    """What one rank sends along the data axes in a step that updates (a skipped one gathers no weights).

    Args:
        buckets: of the layout (`buckets_of`).
        layout: degrees, stage, precision, bucket size.
        micro_batches: of the busiest rank.
        algorithm: ours (either order: they send as much) or the backend's own.
        backend: ``gloo`` or ``nccl``, where the algorithm is the backend's.

    >>> from loadmaster.program.params import ParameterTable
    >>> layout = Layout(dp_shard=4, zero=1, precision="fp32")
    >>> table = ParameterTable.from_named([("w", (1024, 1024), 0, True)])
    >>> data_traffic(buckets_of(table, layout), layout, micro_batches=2).bytes.terms
    mappingproxy({'dp_shard/reduce_scatter': 3145728, 'dp_shard/all_gather': 3145728, 'control/all_gather': 144})
    """
    precision, stage = Precision.named(layout.precision), stage_in_force(layout)
    own = algorithm is not Algorithm.BACKEND
    sums = _Sums(gloo_backend=not own and backend == "gloo")
    trained = [b for b in buckets if b.trainable]
    grad, wire = BYTES[precision.grad], BYTES[precision.reduce]
    shards, replicas = layout.dp_shard, layout.dp_replicate
    times = reductions(micro_batches, zero=stage, reduce_each=layout.reduce_each_micro_batch)
    piece = layout.bucket_bytes if own else 0
    for bucket in trained:
        if shards > 1:
            _scatter(sums, "dp_shard/reduce_scatter", shards, bucket.numel, wire, grad, piece, times)
        if replicas > 1:
            part = bucket.chunk if shards > 1 else bucket.numel
            _all_reduce(sums, replicas, part, wire, grad, piece)
        if shards > 1 and stage == 0:
            sums.gather("dp_shard", shards, bucket.numel, grad)
    if stage:
        _weights(sums, buckets, shards, BYTES[precision.param], stage, micro_batches)
    if layout.dp > 1:
        for numbers in CONTROL_NUMBERS:
            sums.gather("control", layout.dp, layout.dp * numbers, 8)
    return Traffic(Ledger("bytes", sums.num_bytes), Ledger("messages", sums.num_messages))


def _scatter(sums: _Sums, term: str, n: int, elements: int, wire: int, held: int, piece: int, times: int) -> None:
    """`times` reduce-scatters; piece 0 stands for the backend's own."""
    chunk = elements // n
    cuts = -(-chunk // piece_elements(n, piece, max(wire, held))) if piece else 1
    trips = 2 if sums.gloo_backend else 1
    sums.add(term, times * trips * (n - 1) * chunk * wire, times * trips * (n - 1) * cuts)


def _all_reduce(sums: _Sums, n: int, elements: int, wire: int, held: int, piece: int) -> None:
    """A reduce-scatter on the wire's dtype and an all-gather of the result as held; the backend's both on the wire."""
    chunk, term = elements // n, "dp_replicate/all_reduce"
    cuts = -(-chunk // piece_elements(n, piece, max(wire, held))) if piece else 1
    sums.add(term, (n - 1) * chunk * wire, (n - 1) * cuts)
    sums.add(term, (n - 1) * chunk * (held if piece else wire), n - 1)


def _weights(sums: _Sums, buckets: Iterable[Bucket], n: int, element: int, stage: int, micro_batches: int) -> None:
    """Gathers of weights: once a step, or at stage 3 as blocks run."""
    last = max((b.unit for b in buckets if b.unit is not None), default=EMBEDDING)
    for bucket in buckets:
        outside = bucket.unit is None or bucket.unit == EMBEDDING
        times = 1 if outside else micro_batches * (1 if bucket.unit == last else 2)
        sums.gather("dp_shard", n, bucket.numel, element, times=times)


def traffic_terms(
    model: Model | ParameterTable, workload: Workload, layout: Layout, *, algorithm: Algorithm = Algorithm.DIRECT,
    backend: str = "gloo",
) -> dict[str, int]:  # fmt: skip
    """Bytes the busiest rank sends in a step, by axis; data axes exact, tp and pp by what the ops say.

    >>> from loadmaster.describe.model import Model
    >>> work = Workload(global_batch_size=8, seq_len=1024)
    >>> sorted(traffic_terms(Model.from_hf("gpt2"), work, Layout(dp_shard=8, zero=2)))
    ['control/all_gather', 'dp_shard/all_gather', 'dp_shard/reduce_scatter']
    """
    table = model if isinstance(model, ParameterTable) else _busiest_stage(model, layout)
    count = layout.num_micro_batches(workload)
    data = data_traffic(buckets_of(table, layout), layout, micro_batches=count, algorithm=algorithm, backend=backend)
    terms: dict[str, int] = {k: int(v) for k, v in data.bytes.terms.items()}
    if isinstance(model, Model):
        terms |= _model_axes(model, workload, layout, count)
    return {k: v for k, v in terms.items() if v}


def _busiest_stage(model: Model, layout: Layout) -> ParameterTable:
    """Parameters of the pipeline stage that holds most, as a tp rank holds them."""
    table = ParameterTable.from_model(model, tp=layout.tp)
    if layout.pp == 1:
        return table
    per = -(-model.num_layers // layout.pp)
    stages = [[r for r in table.rows if r.layer // per == s and r.layer >= 0] for s in range(layout.pp)]
    stages[0] += [r for r in table.rows if r.layer == EMBEDDING]
    stages[-1] += [r for r in table.rows if r.layer < EMBEDDING and r.tied_to is None]
    tables = [ParameterTable(tuple(rows)) for rows in stages]
    return max(tables, key=lambda t: t.num_params)


def _model_axes(model: Model, workload: Workload, layout: Layout, micro_batches: int) -> dict[str, int]:
    """tp and pp: the residual stream, all-reduced after attention and feed-forward, forward and backward, and sent.

    Shoeybi et al. 2019 (arXiv 1909.08053), section 3: two all-reduces a block each way. Under sequence parallelism
    each is a reduce-scatter and an all-gather: as many bytes (Korthikanti et al. 2022, arXiv
    2205.05198, section 4.2.2).
    """
    tp, pp = layout.tp, layout.pp
    element = BYTES[Precision.named(layout.precision).compute]
    tokens = layout.micro_batch_size * (model.fixed_seq_len or workload.seq_len) // layout.cp
    stream = tokens * model.hidden_size * element
    terms: dict[str, Any] = {}
    if tp > 1:
        layers = -(-model.num_layers // pp)
        name = "tp/reduce_scatter+all_gather" if layout.sequence_parallel else "tp/all_reduce"
        again = 2 if layout.recompute == "full" else 0
        head = 2 * any(op.kind is OpKind.EMBEDDING for op in model.embedding.ops)
        terms[name] = micro_batches * (4 * layers + again * layers + head) * 2 * (tp - 1) * stream // tp
    if pp > 1:
        chunks = layout.virtual_stages
        terms["pp/send"] = 2 * micro_batches * chunks * (stream // tp if layout.sequence_parallel else stream)
    return terms
