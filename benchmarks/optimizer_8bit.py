"""8-bit AdamW against PyTorch's fused fp32 AdamW, torchao and bitsandbytes on this CPU, in one run.

    python benchmarks/optimizer_8bit.py                      # everything
    python benchmarks/optimizer_8bit.py --only speed --repeats 21

Times are medians of steps taken in turns; ratios are medians of paired steps. On a machine that others use, read the
ratio of processor time: the wall clock also counts how well each waits for a core.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loadmaster.laws.quantisation import coding_error, share_lost
from loadmaster.program.codebook import FIRST_MOMENT, SECOND_MOMENT
from loadmaster.runtime import optim

Make = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


def gpt2_small() -> dict[str, tuple[int, ...]]:
    """The 148 tensors of GPT-2 small, 124.4 M parameters."""
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (50257, 768), "wpe.weight": (1024, 768)}
    for i in range(12):
        for name, shape in {
            "ln_1.weight": (768,), "ln_1.bias": (768,), "attn.c_attn.weight": (768, 2304), "attn.c_attn.bias": (2304,),
            "attn.c_proj.weight": (768, 768), "attn.c_proj.bias": (768,), "ln_2.weight": (768,), "ln_2.bias": (768,),
            "mlp.c_fc.weight": (768, 3072), "mlp.c_fc.bias": (3072,), "mlp.c_proj.weight": (3072, 768),
            "mlp.c_proj.bias": (768,),
        }.items():  # fmt: skip
            shapes[f"h.{i}.{name}"] = shape
    return shapes | {"ln_f.weight": (768,), "ln_f.bias": (768,)}


def contenders(others: bool) -> dict[str, Make]:
    """Name to optimizer; those not installed are left out."""
    made: dict[str, Make] = {
        "torch AdamW fused, fp32": lambda named: torch.optim.AdamW([p for _, p in named], fused=True),
        "ours, 8-bit": lambda named: optim.AdamW(named, state_bits=8),
        "ours, 8-bit, embeddings too": lambda named: optim.AdamW(
            [(f"p{i}", p) for i, (_, p) in enumerate(named)], state_bits=8
        ),
        "ours, 32-bit": lambda named: optim.AdamW(named, state_bits=32),
    }
    return made | (_others() if others else {})


def _others() -> dict[str, Make]:
    found: dict[str, Make] = {}
    try:
        import bitsandbytes

        found["bitsandbytes AdamW8bit"] = lambda named: bitsandbytes.optim.AdamW8bit([p for _, p in named])
    except ImportError:
        pass
    try:
        from torchao.optim import AdamW8bit

        found["torchao AdamW8bit"] = lambda named: AdamW8bit([p for _, p in named])
    except ImportError:
        pass
    return found


def parameters(shapes: dict[str, tuple[int, ...]]) -> list[tuple[str, nn.Parameter]]:
    named = []
    for name, shape in shapes.items():
        p = nn.Parameter(0.02 * torch.randn(shape))
        p.grad = 0.01 * torch.randn(shape)
        named.append((name, p))
    return named


def seconds(step: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor seconds (of all threads) of one step."""
    wall, busy = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - busy


def speed(repeats: int, others: bool) -> list[dict]:
    """Step time, ratio to fused fp32, state bytes a parameter, peak extra memory of a step."""
    named = parameters(gpt2_small())
    count = sum(p.numel() for _, p in named)
    baseline = contenders(False)["torch AdamW fused, fp32"](named)
    baseline.step()
    rows = []
    for name, make in contenders(others).items():
        optimizer = baseline if "fused" in name else make(named)
        slow = "ours" not in name and "fused" not in name
        optimizer.step()  # makes state, compiles
        extra = peak_extra(optimizer.step)
        pairs = [(seconds(baseline.step), seconds(optimizer.step)) for _ in range(3 if slow else repeats)]
        rows.append({
            "optimizer": name, "parameters": count, "ms": 1e3 * statistics.median(b[0] for _, b in pairs),
            "ratio_to_fused": statistics.median(b[0] / a[0] for a, b in pairs),
            "ratio_of_best": min(b[0] for _, b in pairs) / min(a[0] for a, _ in pairs),
            "processor_ratio_to_fused": statistics.median(b[1] / a[1] for a, b in pairs),
            "state_bytes_per_parameter": state_bytes(optimizer) / count, "coded": coded_bytes(optimizer),
            "extra_memory_percent_of_parameters": 100 * extra / (4 * count),
        })  # fmt: skip
        print(
            f"{name}: {rows[-1]['ms']:.0f} ms, {rows[-1]['ratio_to_fused']:.3f} of fused", file=sys.stderr, flush=True
        )
        if optimizer is not baseline:
            del optimizer
            gc.collect()
    return rows


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of every tensor of the state, wrapped ones opened."""
    total = 0
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.numel() > 1:
                parts = [getattr(value, n) for n in ("codes", "scale") if hasattr(value, n)] or [value]
                total += sum(t.numel() * t.element_size() for t in parts)
    return total


def coded_bytes(optimizer: torch.optim.Optimizer) -> float | None:
    """State bytes a parameter of the parameters with 8-bit state, for ours."""
    if not isinstance(optimizer, optim.Blockwise):
        return None
    coded = [p for g in optimizer.param_groups for p in g["params"] if optimizer.is_coded(p)]
    held = sum(t.numel() * t.element_size() for p in coded for k, t in optimizer.state[p].items() if k != "step")
    return held / sum(p.numel() for p in coded) if coded else None


def peak_extra(step: Callable[[], object]) -> int:
    """Bytes a step's peak of resident memory lies above what was resident before it (Linux)."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    step()
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return 1024 * int(line.split()[1])


def accuracy(others: bool, elements: int = 1 << 20, steps: int = 20) -> list[dict]:
    """Distance of the weights from fp32 AdamW after some steps of standard normal gradients at rate 1e-3."""

    def weights(make: Make) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        p = nn.Parameter(0.02 * torch.randn(elements, generator=generator))
        optimizer = make([("p", p)])
        for _ in range(steps):
            p.grad = torch.randn(elements, generator=generator)
            optimizer.step()
        return p.detach()

    found = contenders(others)
    exact = weights(found.pop("torch AdamW fused, fp32"))
    rows = []
    for name, make in found.items():
        if name != "ours, 8-bit, embeddings too":
            apart = (weights(make) - exact).abs()
            rows.append({"optimizer": name, "largest": apart.max().item(), "mean": apart.mean().item()})
    return rows


class LanguageModel(nn.Module):
    """A byte-level transformer: 2 blocks of width 128, untied head."""

    def __init__(self, width: int = 128, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.norm(self.blocks(x, mask=mask, is_causal=True)))


def corpus() -> Tensor:
    """A megabyte of real text: sources of Python's standard library."""
    files = sorted(Path(statistics.__file__).parent.glob("*.py"))
    text = b"".join(f.read_bytes() for f in files)[: 1 << 20]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def train(bits: int, seed: int, steps: int, data: Tensor) -> tuple[float, optim.AdamW]:
    """Mean loss of the last 20 steps, and the optimizer with its state."""
    torch.manual_seed(seed)
    model = LanguageModel()
    optimizer = optim.AdamW(model, lr=2e-3, betas=(0.9, 0.99), weight_decay=0.1, state_bits=bits, seed=seed)
    losses = []
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(0, len(data) - 65, (8,), generator=generator)
        batch = torch.stack([data[s : s + 65] for s in starts.tolist()])
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return statistics.mean(losses[-20:]), optimizer


def training(steps: int = 300, seeds: int = 3) -> list[dict]:
    """Final losses of a small language model with 32- and 8-bit state, embeddings exempt."""
    data = corpus()
    rows = []
    for seed in range(seeds):
        plain, coded = (train(bits, seed, steps, data)[0] for bits in (32, 8))
        print(f"seed {seed}: {plain:.4f} with 32-bit state, {coded:.4f} with 8-bit", file=sys.stderr, flush=True)
        rows.append({"seed": seed, "loss_32": plain, "loss_8": coded, "percent": 100 * (coded / plain - 1)})
    mean = statistics.mean(r["percent"] for r in rows)
    return [*rows, {"seed": "mean", "percent": mean}]


def moments(steps: int = 60) -> list[dict]:
    """What each way of coding loses of real second moments, those of the language model's matrices."""
    _, optimizer = train(32, 0, steps, corpus())
    kept = [(p, s["exp_avg"].numpy(), s["exp_avg_sq"].numpy()) for p, s in optimizer.state.items()]
    matrices = [(m, v) for p, m, v in kept if optimizer.shards[p].coded(4096)]
    weight = [v.size for _, v in matrices]

    def mean(numbers: list[float]) -> float:
        return sum(w * n for w, n in zip(weight, numbers, strict=True)) / sum(weight)

    rows = [
        {"second moment": "linear, one scale a tensor", "become_zero": mean([share_lost(v) for _, v in matrices])},
        {"second moment": "linear, one scale a block",
         "become_zero": mean([share_lost(v, block=256) for _, v in matrices])},
    ]  # fmt: skip
    for title, errors in (
        ("second moment", [coding_error(v, SECOND_MOMENT) for _, v in matrices]),
        ("first moment", [coding_error(m, FIRST_MOMENT) for m, _ in matrices]),
    ):
        rows.append({title: "ours", "become_zero": mean([e.lost for e in errors]),
                     "median_relative_error": mean([e.median_relative for e in errors])})  # fmt: skip
    return rows


def show(title: str, rows: list[dict]) -> None:
    print(f"\n{title}")
    for row in rows:
        print("  " + "   ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("speed", "accuracy", "moments", "training"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-others", action="store_true", help="leave torchao and bitsandbytes out")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    others = not args.no_others
    sections: dict[str, Callable[[], list[dict]]] = {
        "speed": lambda: speed(args.repeats, others), "accuracy": lambda: accuracy(others), "moments": moments,
        "training": training,
    }  # fmt: skip
    result = {k: f() for k, f in sections.items() if args.only in (None, k)}
    if args.json:
        print(json.dumps({"kernel": optim.kernel_name(), **result}))
        return
    print(f"kernel: {optim.kernel_name()}")
    for name, rows in result.items():
        show(name, rows)


if __name__ == "__main__":
    main()
