"""Half precision: the scaler skips as often as the law says, and the audit counts what the law expects."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from loadmaster.describe.dtype import DType  # noqa: E402
from loadmaster.describe.layout import Layout  # noqa: E402
from loadmaster.laws.precision import clipped_while_scaled, lost_share, scale_range, scale_start  # noqa: E402
from loadmaster.runtime import OptimizerConfig, StepResult, build  # noqa: E402
from loadmaster.runtime.audit import audit  # noqa: E402
from loadmaster.runtime.extremes import Exponents  # noqa: E402
from loadmaster.runtime.scaler import LossScaler  # noqa: E402

FP16 = DType.named("fp16")


@pytest.mark.parametrize("largest", [0.75, 1e-6, 1.0, 37.0, 65504.0, 1e6])
@pytest.mark.parametrize("init", [2.0**16, 2.0**32])
def test_the_scaler_skips_as_the_law_says(largest: float, init: float) -> None:
    scaler, skips = LossScaler(scale=init), 0
    for _ in range(80):
        overflow = bool(torch.isinf(torch.tensor(largest * scaler.scale).half()))
        skips += overflow
        scaler.update(overflow=overflow)
    law = scale_start(largest, init=init)
    assert (skips, scaler.scale) == (law.skips, law.settles_at)


def fp16_run(gradient: float, steps: int, *, max_norm: float | None = None) -> tuple[list[StepResult], float, float]:
    """Steps in fp16 whose one weight of 1 has this gradient; the results, the last scale, the weight."""

    def loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return module(batch["x"]).float().sum() * gradient, 1

    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    optimizer = OptimizerConfig(name="sgd", lr=1.0, weight_decay=0.0, max_grad_norm=max_norm)
    with build(module, Layout(precision="fp16-mixed"), optimizer=optimizer, loss=loss, count=lambda batch: 1) as engine:
        results = [engine.step([{"x": torch.ones(1, 1)}]) for _ in range(steps)]
        assert engine.scaler is not None
        return results, engine.scaler.scale, module.weight.item()


def test_a_run_skips_as_the_law_says_and_says_so() -> None:
    results, scale, _ = fp16_run(3.0, 5)
    law = scale_start(3.0)
    assert sum(r.skipped for r in results) == law.skips == 2
    assert scale == law.settles_at
    assert "inf or nan" in results[0].reason
    assert [r.grad_norm for r in results[2:]] == [3.0, 3.0, 3.0]


def test_case_2_4_unscale_then_norm_then_clip() -> None:
    results, _, weight = fp16_run(0.5, 1, max_norm=1.0)
    assert results[0].grad_norm == 0.5
    assert results[0].loss_scale == 65536
    assert weight == 1.0 - 0.5, "not clipped"
    wrong_norm, wrong_step = clipped_while_scaled(0.5, 65536, 1.0)
    assert (wrong_norm, wrong_step) == (32768.0, 1.52587890625e-05)
    _, _, clipped = fp16_run(0.5, 1, max_norm=0.25)
    assert clipped == pytest.approx(1.0 - 0.25, abs=1e-6)


@pytest.mark.parametrize(("std", "lr"), [(0.5, 6e-4), (0.3, 1e-3), (0.05, 1e-4)])
def test_the_audit_counts_the_updates_that_the_law_expects_to_be_lost(std: float, lr: float) -> None:
    torch.manual_seed(0)
    module = nn.Linear(256, 256, bias=False)
    nn.init.normal_(module.weight, std=std)
    x = torch.randn(64, 256)
    found = audit(module, [x], precision="bf16-mixed", lr=lr, weight_decay=0.0, steps=1)
    expected = lost_share(lr, std, DType.named("bf16"))
    assert found.measured.lost_share("bf16") == pytest.approx(expected, abs=0.01)


def test_a_scale_in_the_lawful_range_loses_nothing_at_either_end() -> None:
    small, large = 3e-9, 0.4
    low, high = scale_range(small, large)
    seen = Exponents()
    seen.add(torch.tensor([small, large]))
    for scale in (low, high):
        assert seen.share_lost(FP16, scale=scale) == 0
        assert torch.isfinite(torch.tensor(large * scale).half())
    assert torch.isinf(torch.tensor(large * high * 2).half())
    assert torch.tensor(small * low / 2).half() == 0


@pytest.mark.parametrize("scale", [1.0, 2.0**8, 2.0**16])
def test_underflow_is_counted_as_torch_rounds(scale: float) -> None:
    x = torch.randn(50000, generator=torch.Generator().manual_seed(0)) * 3e-8
    seen = Exponents()
    seen.add(x)
    assert seen.share_lost(FP16, scale=scale) == pytest.approx(
        ((x * scale).half() == 0).float().mean().item(), abs=0.02
    )
