"""Accumulation: the engine's loss, norm and skipped windows are the law's, whatever the cut into micro-batches."""

import math

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from loadmaster.describe.layout import Layout  # noqa: E402
from loadmaster.errors import InvalidInput  # noqa: E402
from loadmaster.laws.accumulation import mean_of_means, optimizer_steps, window_loss  # noqa: E402
from loadmaster.program.window import split_into_windows  # noqa: E402
from loadmaster.runtime import OptimizerConfig, build  # noqa: E402

PLAIN = Layout(precision="fp32")


class Scale(nn.Module):
    """One weight of 1; its loss is whatever the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))


def stated(module: nn.Module, batch: dict[str, float]) -> tuple[Tensor, float]:
    return module.weight.sum() * batch["tokens"] * batch["mean_loss"], batch["tokens"]


def step(batches: list[dict[str, float]]):  # type: ignore[no-untyped-def]
    optimizer = OptimizerConfig(name="sgd", lr=0.0, options={"fused": False})
    with build(Scale(), PLAIN, optimizer=optimizer, loss=stated, count=lambda b: b["tokens"]) as engine:
        return engine.step(batches)


def test_case_4_1_a_mean_of_means_is_not_the_mean() -> None:
    batches = [{"tokens": 10.0, "mean_loss": 4.0}, {"tokens": 1000.0, "mean_loss": 2.0}]
    sums, counts = [40.0, 2000.0], [10.0, 1000.0]
    result = step(batches)
    assert result.loss == pytest.approx(2.019802, abs=1e-6)
    assert result.loss == pytest.approx(window_loss(sums, counts), rel=1e-6)
    assert result.grad_norm == pytest.approx(2.019802, abs=1e-6)
    assert mean_of_means(sums, counts) == 3.0


def test_case_4_1_a_window_without_counted_tokens_takes_no_step_and_says_so() -> None:
    result = step([{"tokens": 0.0, "mean_loss": 0.0}, {"tokens": 0.0, "mean_loss": 0.0}])
    assert result.skipped
    assert "no token" in result.reason
    assert math.isfinite(result.loss)
    assert window_loss([0.0, 0.0], [0, 0]) is None


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(23, 8), nn.Linear(8, 23)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(input_ids)))  # type: ignore[no-any-return]


def sequences() -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(3)
    items = []
    for length in (12, 3, 7, 12, 2, 9):
        ids = torch.randint(0, 23, (1, 12), generator=made)
        labels = ids.clone()
        labels[:, length:] = -100
        items.append({"input_ids": ids, "labels": labels})
    return items


def test_case_4_2_accumulation_changes_nothing() -> None:
    items, found = sequences(), []
    for accumulation, size in ((1, 6), (2, 3), (6, 1)):
        groups = [items[i * size : (i + 1) * size] for i in range(accumulation)]
        window = [{k: torch.cat([item[k] for item in group]) for k in group[0]} for group in groups]
        with build(Tiny(), PLAIN, optimizer=OptimizerConfig(lr=1e-3)) as engine:
            result = engine.step(window)
        found.append((result.loss, result.grad_norm, result.tokens))
    for loss, norm, tokens in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        assert norm == pytest.approx(found[0][1], rel=1e-5)
        assert tokens == found[0][2]
    assert 3584 < 4390 <= 2 * 3584  # tokens of two micro-batches of 4 x 896, not of one


def test_case_4_3_the_last_window_of_an_epoch_is_as_short_as_it_is() -> None:
    assert optimizer_steps(10, 4) == 3
    assert tuple(split_into_windows(10, 4)) == (4, 4, 2)
    assert optimizer_steps(3, 4) == 1
    with pytest.raises(InvalidInput, match="at least 1"):
        optimizer_steps(10, 0)
