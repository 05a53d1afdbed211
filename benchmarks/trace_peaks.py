"""Traced peak against the peak of a real run on this CPU, for twelve kinds of module.

The real run is observed by PyTorch's allocator reports (loadmaster/trace/observe.py), not by the tracer. Columns:
bytes of tensors alive at the peak, traced and observed; what else was alive then (the eight bytes of Python numbers
that autograd saves, states of the random generator that checkpoints keep); by how much kernels exceed it with scratch.

    python benchmarks/trace_peaks.py [module ...]
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "trace"))

import zoo
from test_observed import real_run

from loadmaster.trace.api import trace

warnings.filterwarnings("ignore")

CASES = [
    (recompute, optimizer, foreach, precision)
    for recompute in ("none", "full")
    for optimizer, foreach, precision in (
        ("sgd", False, "fp32"), ("adamw", True, "fp32"), ("adamw", False, "fp32"), ("sgd", False, "bf16-mixed"),
    )
]  # fmt: skip


def main() -> None:
    names = sys.argv[1:] or list(zoo.ALL)
    print(f"{'module':9} {'recompute':9} {'optimizer':14} {'precision':10} {'traced':>10} {'observed':>10} "
          f"{'diff':>5} {'other':>6} {'scratch':>8}  peak in")  # fmt: skip
    equal = total = 0
    for name in names:
        for case in CASES:
            recompute, optimizer, foreach, precision = case
            if recompute == "full" and name in zoo.BLOCKLESS:
                continue
            seen = real_run(zoo.ALL[name], *case)
            step = trace(zoo.ALL[name], recompute=recompute, optimizer=optimizer, foreach=foreach, precision=precision)
            total += 1
            equal += step.peak_bytes == seen.peak_bytes
            kind = f"{optimizer} {'foreach' if foreach else 'for-loop'}"
            print(f"{name:9} {recompute:9} {kind:14} {precision:10} {step.peak_bytes:10} {seen.peak_bytes:10} "
                  f"{step.peak_bytes - seen.peak_bytes:5} {seen.unmarked_bytes:6} {seen.scratch_bytes:8}  "
                  f"{step.peak.event}", flush=True)  # fmt: skip
    print(f"{equal} of {total} equal to the byte")


if __name__ == "__main__":
    main()
