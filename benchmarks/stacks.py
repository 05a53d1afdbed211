"""What each training software keeps, as a page: `python benchmarks/stacks.py > docs/stacks.md`."""

from __future__ import annotations

import loadmaster as lm
from loadmaster.describe.stack import STACKS
from loadmaster.laws.activations import saved_tensors
from loadmaster.laws.loss import loss_bytes
from loadmaster.laws.memory import memory_peak
from loadmaster.units import GIB

MODEL, SEQ = "meta-llama/Meta-Llama-3-8B", 8192
LAYOUTS = ("dp_shard=8,zero=1,recompute=full", "dp_shard=8,zero=3,recompute=full", "tp=8,sequence_parallel=true,zero=1")


def names() -> list[str]:
    """One name a stack."""
    modules: dict[str, str] = {}
    for name, module in STACKS.items():
        modules.setdefault(module, name)
    return list(modules.values())


def lines_of(name: str) -> list[str]:
    """The bytes a parameter of one stack, line by line."""
    stack = lm.Stack.named(name)
    dtypes = stack.precision("bf16-mixed")
    rows = [
        f"### {stack.title} (`{name}`)",
        "",
        "| line | bytes | alive | divided by the shards | source |",
        "|---|--:|---|---|---|",
    ]
    for line in stack.state:
        each = line.bytes_each(dtypes)
        if each:
            where = "never" if line.zero is None else f"from ZeRO {line.zero} on"
            when = f" ({line.when})" if line.when else ""
            rows.append(f"| {line.term} | {each} | {line.alive}{when} | {where} | {line.source} |")
    return [*rows, f"| **always, unsharded** | **{stack.bytes_per_param('bf16-mixed')}** | | | |", ""]


def activations_of(name: str) -> str:
    """Bytes a token and layer of Llama-3-8B, no recompute, and bytes a logit."""
    stack, model = lm.Stack.named(name), lm.Model.from_hf(MODEL)
    dtypes = stack.precision("bf16-mixed")
    tensors = saved_tensors(model.blocks[0][0], stack, dtypes)
    each = sum(t.width * t.bytes for t in tensors)
    forward, backward, _ = loss_bytes(stack, dtypes, "cross_entropy")
    return f"| {name} | {each:,} | {each / model.hidden_size:.1f} h | {max(forward, backward)} |"


def totals_of(name: str) -> str:
    """Predicted peak of one layout each on eight H100."""
    stack, model, cluster = lm.Stack.named(name), lm.Model.from_hf(MODEL), lm.Cluster.parse("8xh100-sxm")
    workload = lm.Workload(global_batch_size=32, seq_len=SEQ)
    cells = []
    for text in LAYOUTS:
        peak = memory_peak(model, cluster, workload, lm.Layout.parse(text), stack)
        cells.append(f"{peak.allocated / GIB:.1f} / {peak.total / GIB:.1f}")
    return f"| {name} | " + " | ".join(cells) + " |"


def page() -> list[str]:
    """The whole page."""
    head = [
        "# Why tools disagree: what each training software keeps", "",
        "Written by `python benchmarks/stacks.py`; do not edit. Selecting a stack (`--stack NAME`) makes the memory "
        "and time laws apply these rules.", "",
        f"## The same model, the same layouts: {MODEL}, sequence {SEQ}, global batch 32 on eight H100", "",
        "GiB of the worst rank: live bytes / with the allocator's and the driver's.", "",
        "| stack | " + " | ".join(f"`{text}`" for text in LAYOUTS) + " |", "|---|" + "---|" * len(LAYOUTS),
    ]  # fmt: skip
    middle = [
        "", "## Saved a token and layer (no recompute), and a logit", "",
        "| stack | bytes a token and layer | in units of h | bytes a logit at the worst moment of the loss |",
        "|---|--:|--:|--:|",
    ]  # fmt: skip
    lines = [line for name in names() for line in lines_of(name)]
    return [*head, *map(totals_of, names()), *middle, *map(activations_of, names()), "",
            "## Bytes a parameter, line by line (layout precision `bf16-mixed`)", "", *lines]  # fmt: skip


if __name__ == "__main__":
    print("\n".join(page()))
