"""What windows, parameters and precisions can look like, on two ranks, each against one process."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import Tiny, batched, difference, finish, sequences, start, tiny, whole
from torch import nn

from loadmaster.describe.layout import Layout
from loadmaster.runtime import OptimizerConfig, build

CONFIG = OptimizerConfig(lr=2e-3, max_grad_norm=1.0)
STAGES = [{"dp_replicate": 2}, *({"dp_shard": 2, "zero": z} for z in range(1, 4))]
rank, size = start()
found = {}


def local(shards):
    return {(s.name, s.kind): s.tensor.detach().clone().double() for s in shards}


def run(layout, windows, module=tiny, config=CONFIG, **options):
    engine = build(module(), layout, optimizer=config, **options)
    results = [engine.step(window) for window in windows]
    collect = whole if layout.dp > 1 else local
    out = results, collect(engine.gradients()), collect(engine.state())
    engine.close()
    return out


def layouts(**fields):
    return [Layout(**{"precision": "fp32", "bucket_bytes": 8192, **fields, **stage}) for stage in STAGES]


def against_one(windows_of_rank, window_of_all, module=tiny, config=CONFIG, **options):
    """Worst differences over the stages: (loss, gradient, weight)."""
    one = run(Layout(precision="fp32"), window_of_all, module, config, **options)
    worst = [0.0, 0.0, 0.0]
    for layout in layouts():
        many = run(layout, windows_of_rank[rank], module, config, **options)
        loss = max(abs(a.loss - b.loss) / max(abs(b.loss), 1e-30) for a, b in zip(many[0], one[0], strict=True))
        now = loss, difference(many[1], one[1], "grad"), difference(many[2], one[2], "param")
        worst = [max(a, b) for a, b in zip(worst, now, strict=True)]
    return worst


# ranks with three micro-batches and one, then with two and none
five, two = batched(sequences(0, 4), 1), batched(sequences(1, 2), 1)
found["uneven"] = against_one([[five[:3], two], [five[3:], []]], [five, two])

# weights of micro-batches
heavy = [{**b, "loss_weight": w} for b, w in zip(five, (0.5, 2.0, 1.0, 0.0), strict=True)]
found["weighted"] = against_one([[heavy[:2]], [heavy[2:]]], [heavy])

# a loss of the user's own whose count is known after the forward alone
found["late_count"] = against_one(
    [[five[:3]], [five[3:]]], [five],
    loss=lambda m, b: (m(b["input_ids"]).square().sum(), b["input_ids"].numel()),
)  # fmt: skip

# no counted token anywhere: no step, nothing but finite numbers; then on one rank alone
mute = [{**b, "labels": torch.full_like(b["labels"], -100)} for b in two]
outcomes = []
for layout in layouts():
    engine = build(tiny(), layout, optimizer=CONFIG)
    before = whole(engine.state())
    result = engine.step(mute)
    after = whole(engine.state())
    outcomes.append([result.skipped, result.loss, result.reason, difference(after, before, "param")])
    engine.close()
found["nothing_counts"] = outcomes
found["one_rank_counts"] = against_one([[two], [mute]], [two])


# an inf on one rank alone skips the step on both, and says where
def poisoned(module, batch):
    total, count = (
        F.cross_entropy(module(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum"),
        12,
    )
    return total * batch.get("factor", 1.0), count


outcomes = []
for layout in layouts():
    engine = build(tiny(), layout, optimizer=CONFIG, loss=poisoned, count=lambda b: 12)
    clean = [{k: v.clamp_min(0) for k, v in b.items()} for b in two]
    engine.step(clean[rank : rank + 1])
    before = whole(engine.state())
    result = engine.step([{**clean[rank], "factor": math.inf if rank else 1.0}])
    outcomes.append([result.skipped, result.reason, difference(whole(engine.state()), before, "param")])
    outcomes[-1].append(engine.step(clean[rank : rank + 1]).skipped)
    engine.close()
found["inf"] = outcomes

# a scale too high for fp16 comes down by skipping, on all ranks alike
engine = build(tiny(), Layout(dp_shard=2, zero=2, precision="fp16-mixed"), optimizer=CONFIG)
engine.scaler.scale = 2.0**30
seen = [engine.step(two[rank : rank + 1]) for _ in range(24)]
found["fp16"] = [[r.skipped for r in seen], [r.loss_scale for r in seen], [r.loss for r in seen]]
engine.close()

# every precision computes the same at every stage
found["precision"] = {}
for precision in ("bf16-mixed", "bf16-master", "bf16"):
    runs = [run(layout, [two[rank : rank + 1]] * 3) for layout in layouts(precision=precision)]
    kinds = sorted({kind for _, kind in runs[0][2]})
    found["precision"][precision] = {
        "kinds": kinds, "losses": [r.loss for r in runs[0][0]],
        "differences": [difference(r[2], runs[0][2], "param") for r in runs[1:]],
    }  # fmt: skip


class Odd(Tiny):
    """An unused layer, a frozen one, an embedding with sparse gradients, and two weights of one storage."""

    def __init__(self):
        super().__init__(tied=False)
        self.unused = nn.Linear(5, 5)
        self.table = nn.Embedding(67, 24, sparse=True)
        self.blocks[1].requires_grad_(False)
        self.blocks[2].up.weight = self.blocks[0].up.weight

    def forward(self, input_ids):
        return super().forward(input_ids) + self.head(self.table(input_ids))


def odd():
    torch.manual_seed(0)
    return Odd()


found["odd"] = against_one([[five[:2]] * 2, [five[2:]] * 2], [five] * 2, odd)


# adapters on a frozen majority, whose first blocks take no gradient at all
class Adapted(Tiny):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.adapter = nn.ModuleList([nn.Linear(24, 24)])
        self.blocks[2].up.requires_grad_(True)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.adapter[0](x))


def adapted():
    torch.manual_seed(0)
    return Adapted()


found["frozen"] = against_one([[five[:2]] * 2, [five[2:]] * 2], [five] * 2, adapted)

# any optimizer, groups, an average of the weights, state on the host
for name, config in {
    "momentum": OptimizerConfig(name="sgd_momentum", lr=0.1, weight_decay=0.0),
    "factory": OptimizerConfig(factory=lambda groups: torch.optim.RMSprop(groups, lr=1e-3)),
    "groups": OptimizerConfig(lr=1e-3, groups=lambda n, p: {"weight_decay": 0.1 if p.dim() > 1 else 0.0}),
}.items():
    found[name] = against_one([[five[:2]] * 2, [five[2:]] * 2], [five] * 2, config=config)
averaged = OptimizerConfig(lr=1e-2, ema_decay=0.5)
one = run(Layout(precision="fp32"), [five] * 3, config=averaged)
many = run(
    Layout(precision="fp32", dp_shard=2, zero=1, offload_optimizer=True), [five[2 * rank : 2 * rank + 2]] * 3,
    config=averaged,
)  # fmt: skip
found["average"] = [difference(many[2], one[2], "ema"), difference(many[2], one[2], "param")]


# state moves between layouts, padding never reaches it
class Uneven(nn.Module):
    def __init__(self):
        super().__init__()
        self.vector, self.matrix = nn.Parameter(torch.randn(1001)), nn.Parameter(torch.randn(7, 13))

    def forward(self, x):
        return (self.vector * x).sum() * self.matrix.square().sum()


def uneven():
    torch.manual_seed(0)
    return Uneven()


points = torch.randn(10, 2, 1001, generator=torch.Generator().manual_seed(0)) / 300
own = {"loss": lambda m, b: (m(b["x"]), 1), "count": lambda b: 1}


def windows(layout, steps):
    mine = [rank] if layout.dp > 1 else [0, 1]
    return [[{"x": points[s][i]} for i in mine] for s in steps]


unbroken = run(Layout(precision="fp32"), windows(Layout(), range(10)), uneven, CONFIG, **own)
found["resume"] = []
for saved in layouts()[1:]:
    engine = build(uneven(), saved, optimizer=CONFIG, **own)
    for window in windows(saved, range(5)):
        engine.step(window)
    state = whole(engine.state())
    engine.close()
    counts = {f"{n}/{k}": t.numel() for (n, k), t in state.items()}
    for other in [Layout(precision="fp32"), *layouts()]:
        engine = build(uneven(), other, optimizer=CONFIG, **own)
        engine.load(lambda n, k, a, b, state=state: state[n, k][a:b].float() if (n, k) in state else None, step=5)
        results = [engine.step(window) for window in windows(other, range(5, 10))]
        end = (whole if other.dp > 1 else local)(engine.state())
        engine.close()
        found["resume"].append([
            max(abs(a.loss - b.loss) / abs(b.loss) for a, b in zip(results, unbroken[0][5:], strict=True)),
            *(difference(end, unbroken[2], kind) for kind in ("param", "exp_avg", "exp_avg_sq", "step")),
            counts,
        ])  # fmt: skip

# the norm of a replicated gradient counts once; shards add up
found["norm"] = []
for layout in layouts():
    target = {"loss": lambda m, b: (0.8 * m.weight.flatten()[0] / 2, 0.5), "count": lambda b: 0.5}
    engine = build(nn.Linear(600, 1, bias=False), layout, optimizer=CONFIG, **target)
    found["norm"].append(engine.step([{}]).grad_norm)
    engine.close()


# bytes of a frozen majority, and of gradients that are views of their buckets
class Mostly(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.ParameterList(nn.Parameter(torch.zeros(512, 45), requires_grad=False) for _ in range(8))
        self.trained = nn.ParameterList(nn.Parameter(torch.zeros(512, 5)) for _ in range(8))


found["frozen_bytes"] = []
for layout in layouts():
    sums = {"loss": lambda m, b: (sum(p.sum() for p in m.parameters()), 1), "count": lambda b: 1}
    engine = build(Mostly(), layout, optimizer=CONFIG, blocks=[], **sums)
    engine.step([{}])
    engine.synchronize()
    terms = dict(engine.memory_ledger().terms)
    found["frozen_bytes"].append({k: v / (4 * 8 * 512 * 50) for k, v in terms.items()})
    engine.close()
assert dist.is_initialized()
finish(found)
