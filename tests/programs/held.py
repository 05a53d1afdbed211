"""What an engine holds between steps, beside the law's count from the same tables."""

from tiny import batched, finish, sequences, start, tiny

from loadmaster.describe.layout import Layout
from loadmaster.describe.workload import Workload
from loadmaster.laws.tables import held_terms
from loadmaster.runtime import OptimizerConfig, build

rank, size = start()
rows = []
work = Workload(global_batch_size=size * 2, seq_len=12)
shapes = [(1, size), (size, 1)] + ([(2, size // 2)] if size == 4 else [])
for precision, bits in (("fp32", 32), ("bf16-master", 32), ("bf16", 32), ("fp32", 8)) if size == 2 else (("fp32", 32),):
    for replicate, shard in shapes:
        for zero in range(4 if shard > 1 else 1):
            layout = Layout(
                dp_replicate=replicate, dp_shard=shard, zero=zero, precision=precision, bucket_bytes=8192,
                optimizer_bits=bits, reduce_each_micro_batch=zero == 1 and bits == 8,
            )  # fmt: skip
            engine = build(tiny(), layout, optimizer=OptimizerConfig(state_bits=bits))
            for step in range(3):
                engine.step(batched(sequences(step, 2), 1))
            engine.synchronize()
            law = held_terms(engine.assembly.table, work, layout)
            rows.append(
                {"layout": layout.describe(), "law": law, "held": dict(engine.memory_ledger().terms)}
            )  # fmt: skip
            engine.close()
finish(rows)
