"""Every way to lay the data axes out, against one process: loss, norm, gradients, weights, state."""

import dataclasses
import sys

from tiny import batched, difference, finish, sequences, start, tiny, whole

from loadmaster.describe.layout import Layout
from loadmaster.laws.traffic import data_traffic
from loadmaster.program.buckets import buckets_of
from loadmaster.program.ring import Algorithm
from loadmaster.runtime import OptimizerConfig, build

STEPS, SEQUENCES = int(sys.argv[1]), 8
CONFIG = OptimizerConfig(lr=2e-3, max_grad_norm=1.0)


def run(layout, per_batch, rank, algorithm="auto"):
    share = SEQUENCES // layout.dp
    engine = build(tiny(), layout, optimizer=CONFIG, algorithm=algorithm)
    results = []
    for step in range(STEPS):
        mine = sequences(step, SEQUENCES)[rank * share : (rank + 1) * share]
        results.append(engine.step(batched(mine, per_batch)))
    gradients, state = whole_of(layout, engine.gradients()), whole_of(layout, engine.state())
    law = data_traffic(
        buckets_of(engine.assembly.table, layout), layout, micro_batches=share // per_batch,
        algorithm=Algorithm("direct" if algorithm == "auto" else algorithm),
    )  # fmt: skip
    traffic = {
        "bytes": [dict(law.bytes.terms), dict(engine.traffic_ledger().terms)],
        "messages": [dict(law.messages.terms), dict(engine.message_ledger().terms)],
    }
    engine.close()
    return results, gradients, state, traffic


def whole_of(layout, shards):
    if layout.dp > 1:
        return whole(shards)
    return {(s.name, s.kind): s.tensor.detach().clone().double() for s in shards}


def compare(layout, algorithm, per_batch, reference):
    results, gradients, state, traffic = run(layout, per_batch, rank, algorithm)
    pairs = list(zip(results, reference[0], strict=True))
    return {
        "layout": layout.describe(), "algorithm": algorithm, "per_batch": per_batch,
        "loss": max(abs(a.loss / b.loss - 1) for a, b in pairs),
        "norm": max(abs(a.grad_norm / b.grad_norm - 1) for a, b in pairs),
        "gradient": difference(gradients, reference[1], "grad"),
        "weight": difference(state, reference[2], "param"),
        "exp_avg": difference(state, reference[2], "exp_avg"), **traffic,
    }  # fmt: skip


rank, size = start()
shapes = [(size, 1), (1, size)] + ([(2, size // 2)] if size > 2 else [])
rows = []
for per_batch in (1, SEQUENCES // size):  # several micro-batches a rank, and one
    reference = run(Layout(precision="fp32"), per_batch, 0)
    for replicate, shard in shapes:
        stages = (0, 3) if size > 2 and per_batch > 1 else (0, 1, 2, 3)
        for zero in stages if shard > 1 else (0,):
            layout = Layout(
                dp_replicate=replicate, dp_shard=shard, zero=zero, precision="fp32", bucket_bytes=16384 * size // 2
            )
            if per_batch == 1:
                layout = dataclasses.replace(layout, recompute="full")
            rows.append(compare(layout, "direct", per_batch, reference))
            if size == 2 and per_batch > 1:
                rows += [compare(layout, name, per_batch, reference) for name in ("ring", "backend")]
finish(rows)
