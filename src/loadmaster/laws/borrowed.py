"""Transient whole gradients of stages 2 and 3 and the receive buffers of our reducer, in closed form over columns.

`laws.tables` counts the same from the bucket table, padding and borders of buckets included; this is what a search over
columns takes. With B the largest layer's, E the embedding's and H the head's gradient bytes:

    stage 3:  2 B + E + H      (a layer filling, one under way; what lies outside the blocks open all along)
    stage 2:  max(H, max(B, b) + b, E + b)      with b a bucket under way: bucket_bytes, or the largest
                                               tensor if that is more; and never more than all there is
"""

from __future__ import annotations

from loadmaster.describe.precision import BYTES
from loadmaster.laws.numbers import Number, greater, lesser, where
from loadmaster.laws.placement import Placement
from loadmaster.laws.run import Run
from loadmaster.laws.state import Held, block_params

__all__ = ["borrowed_terms"]


def borrowed_terms(run: Run, params: Held, placement: Placement) -> dict[str, Number]:
    """``buffers/buckets`` and ``buffers/communication``, where the stack borrows gradients by bucket."""
    if not run.stack.borrows_gradients:
        return {}
    layout, each = run.layout, BYTES[run.precision.grad]
    largest: Number = 0
    for block, count in placement.blocks:
        largest = greater(largest, where(count > 0, block_params(run, block).total, 0))
    largest = largest * each
    embedding = block_params(run, run.model.embedding).total * placement.embedding * each
    head = block_params(run, run.model.head).total * placement.head * each
    tensor = max(weight.numel for block, _ in run.model.blocks for weight in block.weights) * each
    bucket = lesser(greater(layout.bucket_bytes, tensor), params.total * each)
    two = lesser(greater(head, greater(greater(largest, bucket), embedding) + bucket), params.total * each)
    three = 2 * largest + embedding + head
    acts = (layout.dp_shard > 1) & (layout.zero >= 2)
    scratch: Number = 0
    for ranks in (layout.dp_shard, layout.dp_replicate):
        scratch = scratch + 2 * (layout.bucket_bytes // ranks) * (ranks - 1)
    return {
        "buffers/buckets": where(acts, where(layout.zero == 3, three, two), 0),
        "buffers/communication": lesser(scratch, 2 * largest),
    }
