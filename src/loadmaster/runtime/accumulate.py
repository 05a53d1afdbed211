"""What a window's micro-batches count for, what an idle rank runs instead, and layers that micro-batching changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loadmaster.errors import InvalidInput
from loadmaster.runtime.loss import IGNORED, CountFunction, MicroBatch

__all__ = ["WindowCount", "batch_dependent_layers", "count_window", "empty_like", "loss_weight"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCount:
    """Of the whole window over every data rank.

    Attributes:
        count: what the loss is divided by: counted tokens, weighted where weights are given (None: not known yet).
        micro_batches: of each data rank.
    """

    count: float | None
    micro_batches: tuple[int, ...]

    @property
    def most(self) -> int:
        """Micro-batches of the busiest rank."""
        return max(self.micro_batches)


def loss_weight(batch: MicroBatch) -> float:
    """The micro-batch's own weight: ``loss_weight``, 1 where absent."""
    weight = batch.get("loss_weight", 1.0)
    return float(weight.item() if isinstance(weight, Tensor) else weight)


def count_window(window: list[MicroBatch], count: CountFunction | None) -> float:
    """This rank's weighted count, in fp64; -1 where it can only be known after the forwards."""
    if count is None:
        return -1.0
    return sum(loss_weight(batch) * float(count(batch)) for batch in window)


def empty_like(batch: MicroBatch | None, device: torch.device) -> MicroBatch:
    """A micro-batch of one example in which nothing counts: what a rank runs to take part in the others' rounds."""
    if batch is None:
        zero = torch.zeros(1, 2, dtype=torch.long, device=device)
        return {"input_ids": zero, "labels": torch.full_like(zero, IGNORED), "loss_weight": 0.0}
    small: MicroBatch = {k: v[:1] if isinstance(v, Tensor) and v.dim() else v for k, v in batch.items()}
    if "labels" in small:
        small["labels"] = torch.full_like(small["labels"], IGNORED)
    return {**small, "loss_weight": 0.0}


# what a micro-batch changes, by layer type and by what a class is called
_BATCH_DEPENDENT: dict[type[nn.Module], str] = {
    nn.modules.batchnorm._BatchNorm: "normalises over its micro-batch alone and updates running statistics after each",
}


_NAMES = (
    "contrastive",
    "infonce",
    "ntxent",
    "clipmodel",
    "siglipmodel",
    "cliploss",
    "sigliploss",
    "barlowtwins",
    "vicreg",
)


def batch_dependent_layers(module: nn.Module) -> dict[str, str]:
    """Layers whose output for one example depends on the others in the micro-batch: name to what changes.

    >>> batch_dependent_layers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    {'1': 'BatchNorm1d normalises over its micro-batch alone and updates running statistics after each'}
    """
    found = {}
    for name, layer in module.named_modules():
        called = type(layer).__name__
        for kind, effect in _BATCH_DEPENDENT.items():
            if isinstance(layer, kind) and layer.training:
                found[name] = f"{called} {effect}"
        if any(word in called.lower() for word in _NAMES):
            found[name] = f"{called} compares examples within its micro-batch alone: fewer negatives than in one batch"
    return found


def check_window(window: Any) -> list[MicroBatch]:
    """A window is a sequence of micro-batches.

    Raises:
        InvalidInput: it is a single micro-batch, or holds something else.
    """
    if isinstance(window, dict):
        raise InvalidInput("window", "a micro-batch", "must be a list of micro-batches", "write engine.step([batch])")
    batches = list(window)
    for i, batch in enumerate(batches):
        if not isinstance(batch, dict):
            raise InvalidInput(
                f"window[{i}]", type(batch).__name__, "must be a dict of tensors", "give input_ids and labels by name"
            )
    return batches
