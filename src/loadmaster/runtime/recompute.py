"""Recomputation: the blocks the segment table names run under the non-reentrant checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from loadmaster.describe.layout import Layout

__all__ = ["recompute_blocks", "recomputed_blocks"]

# What is kept: outputs of matrix products and convolutions, the dear part of a forward. Attention scores are batched
# products and are made again, as is everything cheap; random work too, from the kept random state.
_KEPT = ("mm", "addmm", "_grouped_mm", "convolution")


def recomputed_blocks(num_blocks: int, layout: Layout) -> tuple[int, ...]:
    """Indices of the blocks that are recomputed, wholly or but for their matrix products."""
    match layout.recompute:
        case "full" | "selective":
            return tuple(range(num_blocks))
        case "blocks":
            return tuple(range(min(layout.recompute_blocks, num_blocks)))
        case _:
            return ()


def recompute_blocks(blocks: Sequence[nn.Module], layout: Layout) -> None:
    """Run the chosen blocks' forwards under checkpoint; random state is kept, so dropout masks repeat."""
    options: dict[str, Any] = {"use_reentrant": False}
    if layout.recompute == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _products_policy)
    for index in recomputed_blocks(len(blocks), layout):
        block = blocks[index]
        block.forward = _checkpointed(block.forward, options)


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(partial(forward, **kwargs), *args, **options)

    return run


def _products_policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save what a matrix product made; recompute the attention core, norms, activations and random work."""
    name = str(op.__name__ if hasattr(op, "__name__") else op).split(".")[0]
    return CheckpointPolicy.MUST_SAVE if name in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
