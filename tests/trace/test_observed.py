"""The traced peak equals the peak that PyTorch's allocator reports in a real run, to the byte."""

import contextlib

import pytest
import torch

from loadmaster.trace.api import trace
from loadmaster.trace.observe import observe
from loadmaster.trace.recompute import recompute_blocks
from loadmaster.trace.step import StepPlan, default_loss

NAMES = (
    "gpt2", "llama", "mixtral", "t5", "bert", "vit", "whisper", "resnet50", "unet", "lstm", "shared", "lora",
)  # fmt: skip
# recompute, optimizer, foreach, precision: the first two for every module, the others for some (all of them are
# in benchmarks/trace_peaks.py)
EVERY = (("none", "adamw", False, "fp32"), ("full", "adamw", True, "fp32"))
SOME = (("full", "sgd", False, "fp32"), ("none", "sgd", False, "bf16-mixed"))
CASES = [(name, case) for name in NAMES for case in EVERY] + [
    (name, case) for name in ("llama", "bert", "resnet50") for case in SOME
]  # fmt: skip


def real_run(factory, recompute, optimizer, foreach, precision):
    """The same two steps, without a tracer."""
    plan = StepPlan(optimizer=optimizer, foreach=foreach)
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16-mixed" else contextlib.nullcontext()

    def run():
        module, inputs = factory()
        module.train()
        recompute_blocks(module, recompute)
        update = plan.build_optimizer(module)
        for _ in range(2):
            with autocast:
                loss = default_loss(module(**inputs) if isinstance(inputs, dict) else module(*inputs))
            loss.backward()
            del loss
            update.step()
            update.zero_grad()

    return observe(run)


@pytest.mark.parametrize(("name", "case"), CASES, ids=lambda c: c if isinstance(c, str) else "-".join(map(str, c)))
def test_traced_peak_is_the_observed_peak(zoo, name, case):
    recompute, optimizer, foreach, precision = case
    if recompute == "full" and name in zoo.BLOCKLESS:
        pytest.skip("no repeated blocks")
    factory = zoo.ALL[name]
    seen = real_run(factory, *case)
    traced = trace(factory, optimizer=optimizer, foreach=foreach, recompute=recompute, precision=precision)
    assert traced.peak_bytes == seen.peak_bytes, (str(traced.peak.event), seen)
    assert seen.unmarked_bytes < 0.02 * seen.peak_bytes


def test_bf16_weights(zoo):
    """All in bf16: the factory builds in fp32 for a moment, which is not the peak of the step."""
    traced = trace(zoo.llama, optimizer="adamw", precision="bf16")
    full = trace(zoo.llama, optimizer="adamw", precision="fp32")
    assert traced.peak_in("forward").by_category["parameter"] * 2 == full.peak_in("forward").by_category["parameter"]
