"""Bytes and messages really sent by two ranks, beside the law, for every stage, accumulation and algorithm."""

from tiny import batched, finish, sequences, start, tiny

from loadmaster.describe.layout import Layout
from loadmaster.laws.traffic import data_traffic
from loadmaster.program.buckets import buckets_of
from loadmaster.program.ring import Algorithm
from loadmaster.runtime import build

rank, size = start()
rows = []
shapes = [(1, size), (size, 1)]
kinds = [("fp32", "direct"), ("fp32", "ring"), ("fp32", "backend"), ("bf16-master", "direct")]
for precision, algorithm in kinds:
    for replicate, shard in shapes if algorithm == "direct" else shapes[:1]:
        for zero in range(4 if shard > 1 else 1):
            for count in (1, 2) if algorithm == "direct" and precision == "fp32" else (2,):
                layout = Layout(
                    dp_replicate=replicate, dp_shard=shard, zero=zero, precision=precision, bucket_bytes=8192,
                    reduce_each_micro_batch=zero == 1 and count == 2,
                )  # fmt: skip
                engine = build(tiny(), layout, algorithm=algorithm)
                mine = sequences(0, count if rank == 0 else 1)  # the others have fewer micro-batches
                engine.step(batched(mine, 1))
                engine.step(batched(mine, 1))
                law = data_traffic(
                    buckets_of(engine.assembly.table, layout), layout, micro_batches=count,
                    algorithm=Algorithm(algorithm),
                )  # fmt: skip
                rows.append({
                    "layout": layout.describe(), "algorithm": algorithm,
                    "bytes": [dict(law.bytes.terms), dict(engine.traffic_ledger().terms)],
                    "messages": [dict(law.messages.terms), dict(engine.message_ledger().terms)],
                })  # fmt: skip
                engine.close()
finish(rows)
