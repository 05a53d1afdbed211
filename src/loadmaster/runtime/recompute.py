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

_ATTENTION_CORE = ("scaled_dot_product", "_softmax", "bmm", "dropout", "_flash_attention", "_efficient_attention")
# dropout on the CPU fills an empty tensor in place: all random work is done again, from the kept random state
_RANDOM = ("empty", "bernoulli", "rand")


def recomputed_blocks(num_blocks: int, layout: Layout) -> tuple[int, ...]:
    """Indices of the blocks that are recomputed, wholly or in their attention core."""
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
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _attention_core_policy)
    for index in recomputed_blocks(len(blocks), layout):
        block = blocks[index]
        block.forward = _checkpointed(block.forward, options)


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(partial(forward, **kwargs), *args, **options)

    return run


def _attention_core_policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Recompute the attention core and whatever draws numbers or writes in place, save all else."""
    name = op.__name__ if hasattr(op, "__name__") else str(op)
    schema = getattr(op, "_schema", None)
    again = any(part in name for part in _ATTENTION_CORE + _RANDOM) or (schema is not None and schema.is_mutable)
    return CheckpointPolicy.PREFER_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE
