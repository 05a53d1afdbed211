"""A small language model on real text: 8-bit state, embeddings exempt, ends where fp32 state ends."""

import statistics
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loadmaster.runtime import optim


class LanguageModel(nn.Module):
    def __init__(self, width: int = 64, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.block(self.tokens(ids) + self.positions.weight[: ids.shape[1]], mask, is_causal=True))


def final_loss(bits: int, seed: int, steps: int = 200) -> float:
    """Mean of the last 30 steps, each on 16 pieces of a Python source."""
    data = torch.frombuffer(bytearray(Path(statistics.__file__).read_bytes()), dtype=torch.uint8).long()
    torch.manual_seed(seed)
    model = LanguageModel()
    optimizer = optim.AdamW(model, lr=3e-3, betas=(0.9, 0.99), state_bits=bits, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        starts = torch.randint(0, len(data) - 33, (16,), generator=generator).tolist()
        batch = torch.stack([data[s : s + 33] for s in starts])
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return statistics.mean(losses[-30:])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_final_loss_is_within_one_per_cent_of_fp32(seed: int) -> None:
    assert final_loss(8, seed) == pytest.approx(final_loss(32, seed), rel=0.01)
