"""The loss of a micro-batch as (sum, count): the mean is taken once, over the whole window and every data rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loadmaster.errors import InvalidInput

__all__ = ["IGNORED", "CausalLanguageModel", "CountFunction", "LossFunction", "count_labels"]

IGNORED = -100  # label of a position that does not count

MicroBatch = dict[str, Any]
# (module, micro-batch) -> (sum of the losses, how many it sums over)
LossFunction = Callable[[nn.Module, MicroBatch], tuple[Tensor, Tensor | int | float]]
# micro-batch -> how many losses it will sum over, known before its forward
CountFunction = Callable[[MicroBatch], Tensor | int | float]


def count_labels(batch: MicroBatch) -> Tensor:
    """Positions that count: labels after the shift by one that are not `IGNORED`."""
    if "labels" not in batch:
        raise InvalidInput(
            "micro-batch.labels", "missing", "is needed to count tokens", "give labels, or a loss of your own"
        )
    labels: Tensor = batch["labels"]
    return (labels[..., 1:] != IGNORED).sum()


class CausalLanguageModel:
    """Next-token cross entropy of a module that returns logits, summed over counted positions, in fp32.

    Labels follow Hugging Face: equal to the inputs, shifted here, `IGNORED` where nothing counts.

    Args:
        chunk: tokens whose fp32 logits exist at once; None: all of a micro-batch.
    """

    def __init__(self, chunk: int | None = None) -> None:
        self.chunk = chunk

    def __call__(self, module: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """(sum, count) of one micro-batch."""
        inputs = {k: v for k, v in batch.items() if k not in ("labels", "loss_weight")}
        out = module(**inputs)
        logits = out if isinstance(out, Tensor) else out["logits"] if isinstance(out, dict) else out.logits
        targets = F.pad(batch["labels"], (0, 1), value=IGNORED)[..., 1:].reshape(-1)
        rows = logits.reshape(-1, logits.shape[-1])
        return self._sum(rows, targets), (targets != IGNORED).sum()

    def _sum(self, rows: Tensor, targets: Tensor) -> Tensor:
        if self.chunk is None or len(targets) <= self.chunk:
            return cross_entropy_sum(rows, targets)
        parts = zip(torch.split(rows, self.chunk), torch.split(targets, self.chunk), strict=True)
        from torch.utils.checkpoint import checkpoint

        sums = [checkpoint(cross_entropy_sum, r, t, use_reentrant=False) for r, t in parts]
        return torch.stack(sums).sum()


def cross_entropy_sum(rows: Tensor, targets: Tensor) -> Tensor:
    """Sum of -log softmax over targets that count."""
    return F.cross_entropy(rows.float(), targets, ignore_index=IGNORED, reduction="sum")
