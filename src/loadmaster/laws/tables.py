"""What our runtime holds between steps, counted from the tables it executes: exact, padding and ranges included.

The closed form of `laws.memory` divides parameters by shards; this replays the bucket table. On the fullest rank, with
buckets b of n_b elements (padding in), chunks n_b / shards and e the bytes of an element:

    parameters   stage 0: sum of the tensors, 1 and 2: sum of n_b e, 3: sum of n_b e / shards
    gradients    sum of n_b e while every rank keeps them whole, else sum of n_b e / shards
    optimizer    of the ranges a rank owns, padding excluded

Source: Rajbhandari et al. 2019 (arXiv 1910.02054), section 5, over the flat buffers of `program.buckets`.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadmaster.describe.layout import Layout
from loadmaster.describe.model import Model
from loadmaster.describe.precision import BYTES, Precision
from loadmaster.describe.workload import Workload
from loadmaster.laws.quantisation import state_terms
from loadmaster.program.buckets import Bucket, buckets_of, stage_in_force
from loadmaster.program.codebook import looks_like_embedding
from loadmaster.program.params import EMBEDDING, HEAD, ParameterTable
from loadmaster.program.ring import piece_elements
from loadmaster.program.shards import Range, fullest_rank, owned_ranges, whole_ranges
from loadmaster.program.window import reduces_each

__all__ = ["held_terms", "pool_elements"]

_TRIED = 64  # ranks whose 8-bit state is counted one by one


def held_terms(model: Model | ParameterTable, workload: Workload, layout: Layout) -> dict[str, int]:
    """Bytes by term that the fullest data rank holds between two steps.

    >>> table = ParameterTable.from_named([("v", (1001,), 0, True), ("m", (7, 13), 0, True)])
    >>> work = Workload(global_batch_size=2, seq_len=1)
    >>> held_terms(table, work, Layout(dp_shard=2, zero=1, precision="fp32"))["parameters"]   # 1024 + 256 + 256 pad
    6144
    """
    table = model if isinstance(model, ParameterTable) else ParameterTable.from_model(model)
    buckets, precision = buckets_of(table, layout), Precision.named(layout.precision)
    trained = [b for b in buckets if b.trainable]
    rank = fullest_rank(trained, layout.dp_shard)
    if layout.optimizer_bits == 8 and layout.dp_shard <= _TRIED:
        sizes = [sum(_optimizer(table, trained, r, workload, layout).values()) for r in range(layout.dp_shard)]
        rank = sizes.index(max(sizes))  # whoever owns embeddings keeps 4 bytes of each element's moments
    terms = {
        "parameters": _parameters(table, buckets, layout) * BYTES[precision.param],
        "gradients": _gradients(trained, layout) * BYTES[precision.grad],
        **_optimizer(table, trained, rank, workload, layout),
        "buffers/buckets": _borrowed(table, trained, layout) * BYTES[precision.grad],
        "buffers/communication": _scratch(trained, layout),
    }
    return {name: number for name, number in terms.items() if number}


def _parameters(table: ParameterTable, buckets: Sequence[Bucket], layout: Layout) -> int:
    match stage_in_force(layout):
        case 0:
            return table.num_params
        case 3:
            return sum(b.chunk for b in buckets)
        case _:
            return sum(b.numel for b in buckets) + table.num_params - table.num_trainable_params


def _keeps_whole_gradients(layout: Layout) -> bool:
    stage = stage_in_force(layout)
    return stage == 0 or not reduces_each(stage, layout.reduce_each_micro_batch)


def _gradients(trained: Sequence[Bucket], layout: Layout) -> int:
    return sum(b.numel if _keeps_whole_gradients(layout) else b.chunk for b in trained)


def _optimizer(
    table: ParameterTable, trained: Sequence[Bucket], rank: int, workload: Workload, layout: Layout
) -> dict[str, int]:
    """Masters, moments, scales and step counters of the ranges that `rank` updates."""
    own: list[Range] = []
    for bucket in trained:
        own += owned_ranges(bucket, rank) if stage_in_force(layout) else whole_ranges(bucket)
    precision = Precision.named(layout.precision)
    elements = sum(r.numel for r in own)
    if layout.offload_optimizer:
        return {}
    terms = {"optimizer/master": elements * BYTES[precision.master] if precision.master else 0}
    rows = {row.name: row for row in table.rows}
    whole = [(rows[r.name].numel, looks_like_embedding(r.name), r.start, r.stop) for r in own]
    state = state_terms(whole, optimizer=workload.optimizer, bits=layout.optimizer_bits)
    if layout.optimizer_bits == 32:  # moments have the dtype of what the optimizer updates
        state = {name: elements * BYTES[precision.moment] for name in state if name != "optimizer/scales"}
    counters = 4 * len(own) if workload.optimizer in ("adamw", "adam", "adagrad") or layout.optimizer_bits == 8 else 0
    return {**terms, **state, "optimizer/step": counters}


def _borrowed(table: ParameterTable, trained: Sequence[Bucket], layout: Layout) -> int:
    """Elements of the transient whole gradients of stages 2 and 3, at most (a quick link hands them back sooner)."""
    if _keeps_whole_gradients(layout):
        return 0
    layers = {row.name: row.layer for row in table.rows}
    spans = [(b.numel, frozenset(layers[e.name] for e in b.entries)) for b in trained]
    return pool_elements(spans)


def pool_elements(buckets: Sequence[tuple[int, frozenset[int]]]) -> int:
    """Most that is borrowed at once, of (elements, layers in it) in the order of the backward.

    The buckets of the layer at work are open together, since a layer's gradients come in no fixed order; one more is
    under way (the first of a backward waits for what the micro-batch before left). A bucket of all that lies outside
    the blocks is open from the head's backward to the embedding's.

    >>> blocks = [(10, frozenset({2})), (10, frozenset({1})), (10, frozenset({0}))]
    >>> pool_elements([*blocks, (4, frozenset({EMBEDDING, HEAD}))]), pool_elements([(6, frozenset({0}))])
    (24, 6)
    """
    always = sum(n for n, layers in buckets if {EMBEDDING, HEAD} <= layers)
    passing = [(n, layers) for n, layers in buckets if not {EMBEDDING, HEAD} <= layers]
    most = 0
    for layer in {layer for _, layers in passing for layer in layers}:
        open_now = [i for i, (_, layers) in enumerate(passing) if layer in layers]
        under_way = passing[open_now[0] - 1][0] if open_now[0] else 0
        most = max(most, sum(passing[i][0] for i in open_now) + under_way)
    return most + always


def _scratch(trained: Sequence[Bucket], layout: Layout) -> int:
    """Receive buffers, an axis: what all other ranks send of one piece, twice: the next travels while one is added."""
    precision = Precision.named(layout.precision)
    wire, held = BYTES[precision.reduce], BYTES[precision.grad]
    total = 0
    sizes = [b.chunk if stage_in_force(layout) or layout.dp_shard > 1 else b.numel for b in trained]
    for ranks, chunks in (
        (layout.dp_shard, sizes),
        (layout.dp_replicate, [size // layout.dp_replicate for size in sizes]),
    ):
        if ranks > 1 and chunks:
            longest = min(max(chunks), piece_elements(ranks, layout.bucket_bytes, max(wire, held)))
            total += 2 * (ranks - 1) * longest * wire
    return total
