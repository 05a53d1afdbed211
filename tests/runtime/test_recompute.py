"""Turning recomputation on moves neither the loss nor a gradient, dropout included; bit for bit."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from loadmaster.describe.layout import Layout  # noqa: E402
from loadmaster.runtime import OptimizerConfig, build  # noqa: E402


class Layer(nn.Module):
    """Attention and a dropped-out product."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(*x.shape[:2], 2, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        return x + F.dropout(self.out(y.transpose(1, 2).flatten(2)).relu(), 0.2)


class Dropping(nn.Module):
    """Three layers that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(29, 16), nn.Linear(16, 29)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(F.dropout(x, 0.1))  # type: ignore[no-any-return]


def step(**recompute: object) -> tuple[float, dict[str, Tensor]]:
    ids = torch.randint(0, 29, (2, 10), generator=torch.Generator().manual_seed(5))
    window = [{"input_ids": ids, "labels": ids}, {"input_ids": ids + 0, "labels": ids + 0}]
    with build(Dropping(), Layout(precision="fp32", **recompute), optimizer=OptimizerConfig(lr=1e-3)) as engine:  # type: ignore[arg-type]
        torch.manual_seed(1)
        result = engine.step(window)
        return result.loss, {s.name: s.tensor.clone() for s in engine.gradients()}


@pytest.mark.parametrize(
    "recompute",
    [{"recompute": "full"}, {"recompute": "selective"}, {"recompute": "blocks", "recompute_blocks": 2}],
    ids=lambda r: r["recompute"],
)
def test_recomputation_moves_nothing(recompute: dict[str, object]) -> None:
    loss, gradients = step()
    again, others = step(**recompute)
    assert again == loss
    assert set(others) == set(gradients)
    assert len(gradients) > 10
    for name, gradient in gradients.items():
        assert torch.equal(others[name], gradient), name
