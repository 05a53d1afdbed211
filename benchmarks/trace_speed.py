"""One training step of the Llama-3-8B shape: our trace against torch's MemTracker, in the same process.

Both run on no device and no data: batch 1, sequence 8192, bf16 weights, SDPA, AdamW foreach, one step (forward, loss,
backward, update). Prints both times, both peaks, and what makes up the difference.

    python benchmarks/trace_speed.py [--layers 32] [--seq 8192]
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from loadmaster.trace.api import trace
from loadmaster.trace.ghost import shared_plans
from loadmaster.units import format_bytes

warnings.filterwarnings("ignore")


def config(layers: int):
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, use_cache=False,
    )  # fmt: skip


def ours(layers: int, seq: int, steps: int):
    from transformers import LlamaForCausalLM

    def build():
        ids = torch.zeros(1, seq, dtype=torch.long)
        return LlamaForCausalLM(config(layers)), {"input_ids": ids, "labels": ids}

    shared_plans.cache_clear()
    began = time.perf_counter()
    step = trace(build, precision="bf16", optimizer="adamw", foreach=True, steps=steps)
    return time.perf_counter() - began, step


def mem_tracker(layers: int, seq: int):
    from transformers import LlamaForCausalLM

    began = time.perf_counter()
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        module = LlamaForCausalLM(config(layers))
        torch.set_default_dtype(torch.float32)
        ids = torch.zeros(1, seq, dtype=torch.long)
        optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
        tracker = MemTracker()
        tracker.track_external(module, optimizer, ids)
        built = time.perf_counter() - began
        with tracker:
            loss = module(input_ids=ids, labels=ids).loss
            seconds = time.perf_counter() - began
            alive = living(tracker)
            began = time.perf_counter() - seconds
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
    seconds = time.perf_counter() - began
    snapshot = next(iter(tracker.get_tracker_snapshot("peak").values()))
    return seconds, built, {str(name): int(size) for name, size in snapshot.items()}, alive


def living(tracker) -> Counter[int]:
    """Sizes of the storages it follows."""
    infos = [i for entry in tracker._WINFO.values() for i in (entry if isinstance(entry, tuple) else [entry])]
    return Counter(i.size * i.element_size for i in infos if hasattr(i, "element_size"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--seq", type=int, default=8192)
    args = parser.parse_args()
    ours(1, 64, 1)  # imports on both sides are paid here
    with warnings.catch_warnings():
        mem_tracker(1, 64)
    seconds, step = ours(args.layers, args.seq, 1)
    both, two = ours(args.layers, args.seq, 2)
    theirs, built, snapshot, alive = mem_tracker(args.layers, args.seq)
    print(f"trace, one step         {seconds:8.2f} s   peak {step.peak_bytes} ({format_bytes(step.peak_bytes)})")
    print(f"trace, two steps        {both:8.2f} s   peak {two.peak_bytes} ({format_bytes(two.peak_bytes)})")
    print(f"MemTracker, one step    {theirs:8.2f} s   peak {snapshot['Total']} ({format_bytes(snapshot['Total'])})")
    print(f"  of which building the module {built:.2f} s; {theirs / seconds:.1f} times our time")
    difference = snapshot["Total"] - step.peak_bytes
    print(f"difference of the peaks: {difference} bytes ({format_bytes(difference)})")
    print("MemTracker at its peak: ", {k: format_bytes(v) for k, v in snapshot.items()})
    print(
        "trace at its peak:      ",
        {k: format_bytes(v) for k, v in step.peak.by_category.items()},
        "in",
        step.peak.event,
    )
    explain(step, alive, args)


def explain(step, alive: Counter[int], args) -> None:
    """Storages alive at the end of the forward that only one of the two has.

    A model of transformers that sees a FakeTensor takes another path than in a real run: it builds an explicit causal
    mask, SDPA keeps a bf16 copy of it a layer, and with a mask it is given keys and values repeated for all heads.
    """
    names = [name for name, _ in step.phases]
    end = step.phases[names.index("backward")][1]
    position = int((step.delta_event < end).sum()) - 1
    mine = Counter(item.bytes for item in step.live_at(position))
    known = {
        2 * args.seq * args.seq: "a bf16 copy of the mask",
        args.seq * args.seq: "the bool mask",
        2 * args.seq * 32 * 128: "keys or values repeated for 32 heads (or a hidden state)",
        2 * args.seq * 8 * 128: "keys or values of 8 heads",
    }
    total = 0
    for size in sorted(set(mine) | set(alive), reverse=True):
        extra = alive[size] - mine[size]
        if extra:
            total += extra * size
            print(f"  {extra:+5d} x {size:>12} bytes in MemTracker: {known.get(size, '')}")
    print(f"  sum at the end of the forward: {total} bytes")


if __name__ == "__main__":
    main()
