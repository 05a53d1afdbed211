"""8-bit state under every ZeRO stage against one process, and a resume from each stage into every other."""

import torch
from tiny import batched, finish, sequences, start, tiny, whole

from loadmaster.describe.layout import Layout
from loadmaster.runtime import OptimizerConfig, build

CONFIG = OptimizerConfig(lr=2e-3, max_grad_norm=1.0, state_bits=8, options={"min_elements": 256})


def steps(engine, rank, share, numbers) -> None:
    for step in numbers:
        engine.step(batched(sequences(step, 8)[rank * share : (rank + 1) * share], share))


def shards(engine, layout) -> dict:
    if layout.dp > 1:
        return whole(engine.state())
    return {(s.name, s.kind): s.tensor.detach().clone().double() for s in engine.state()}


def differing(a: dict, b: dict) -> list[str]:
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return [f"{name} {kind}" for (name, kind), t in a.items() if not torch.equal(t.view(-1), b[name, kind].view(-1))]


rank, size = start()
share = 8 // size
alone = build(tiny(), Layout(precision="fp32"), optimizer=CONFIG)
for step in range(6):  # the same sums: one micro-batch for each rank's share
    alone.step(batched(sequences(step, 8), share))
expected = shards(alone, Layout())
found = {}
for zero in range(4):
    layout = Layout(dp_shard=size, zero=zero, precision="fp32", bucket_bytes=8192)
    engine = build(tiny(), layout, optimizer=CONFIG, algorithm="direct")
    steps(engine, rank, share, range(3))
    kept = {k: t.float() for k, t in whole(engine.state()).items()}
    steps(engine, rank, share, range(3, 6))
    found[f"zero={zero}"] = differing(shards(engine, layout), expected)
    terms = engine.memory_ledger().terms
    found[f"terms {zero}"] = sorted(k for k in terms if k.startswith("optimizer/"))
    engine.close()
    other = Layout(dp_shard=size, zero=(zero + 1) % 4, precision="fp32", bucket_bytes=8192)
    again = build(tiny(), other, optimizer=CONFIG, algorithm="direct")
    again.load(lambda name, kind, a, b, kept=kept: kept[name, kind].reshape(-1)[a:b], step=3)
    steps(again, rank, share, range(3, 6))
    found[f"resumed zero={other.zero}"] = differing(shards(again, other), expected)
    again.close()
coded = {k[0] for k in expected if k[1] == "exp_avg_scale"}
finish({"found": found, "coded": sorted(coded)})
