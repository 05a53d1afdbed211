"""bf16 weights without masters: nearest rounding stalls, stochastic rounding follows fp32 in the mean."""

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from loadmaster.describe.layout import Layout  # noqa: E402
from loadmaster.runtime import OptimizerConfig, build  # noqa: E402


class Ones(nn.Module):
    """4096 weights of 1, each pulled down by the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4096))


def pull(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return module.weight.float().sum(), 1


def weights_after(precision: str, steps: int, *, bits: int = 32) -> Tensor:
    layout = Layout(precision=precision, optimizer_bits=bits)
    config = OptimizerConfig(lr=6e-4, weight_decay=0.0, state_bits=bits)
    with build(Ones(), layout, optimizer=config, loss=pull, count=lambda batch: 1) as engine:
        for _ in range(steps):
            engine.step([{}])
        return next(s.tensor for s in engine.state() if s.kind == "param").float().clone()


def test_case_2_5_nearest_rounding_stalls_and_stochastic_rounding_does_not() -> None:
    fp32 = weights_after("fp32", 20).mean().item()
    assert fp32 == pytest.approx(1 - 20 * 6e-4, abs=1e-5)
    assert torch.equal(weights_after("bf16", 20), torch.ones(4096))
    for bits in (32, 8):
        stochastic = weights_after("bf16-stochastic", 20, bits=bits)
        assert stochastic.mean().item() == pytest.approx(fp32, abs=5e-4)
        assert torch.equal(stochastic, stochastic.bfloat16().float())


def test_rounding_is_seeded() -> None:
    assert torch.equal(weights_after("bf16-stochastic", 3), weights_after("bf16-stochastic", 3))
