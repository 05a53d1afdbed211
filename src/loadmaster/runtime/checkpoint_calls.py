"""Watches the checkpoints a module really makes: random state not kept around random work, inputs without gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

__all__ = ["CheckpointCalls", "watch_checkpoints"]


@dataclass(slots=True)
class CheckpointCalls:
    """What was seen.

    Attributes:
        calls: checkpoints made.
        random_not_kept: of them, those that drew random numbers with preserve_rng_state=False.
        cut_off: re-entrant ones none of whose inputs requires a gradient, so that their inside gets none.
    """

    calls: int = 0
    random_not_kept: int = 0
    cut_off: int = 0

    @contextmanager
    def around(self, preserve: bool) -> Iterator[None]:
        """Around a checkpointed forward: did it move a random state that is not kept?"""
        self.calls += 1
        before = torch.get_rng_state()
        yield
        if not preserve and not torch.equal(before, torch.get_rng_state()):
            self.random_not_kept += 1


@contextmanager
def watch_checkpoints() -> Iterator[CheckpointCalls]:
    """Stand between `torch.utils.checkpoint` and its two implementations while the block runs.

    Both are looked up by name at every call, whichever way the user imported `checkpoint`; a PyTorch without
    these names is run unwatched.
    """
    seen = CheckpointCalls()
    plain = getattr(torch_checkpoint, "_checkpoint_without_reentrant_generator", None)
    reentrant: Any = getattr(torch_checkpoint, "CheckpointFunction", None)
    if plain is None or reentrant is None:
        yield seen
        return

    def watched(function: Callable[..., Any], preserve: bool = True, *args: Any, **kwargs: Any) -> Iterator[None]:
        """PyTorch runs the forward where the generator yields."""
        with seen.around(preserve):
            yield from plain(function, preserve, *args, **kwargs)

    class Watched:
        """As `CheckpointFunction`, for the one name that callers use."""

        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            if torch.is_grad_enabled() and not any(isinstance(a, Tensor) and a.requires_grad for a in args):
                seen.cut_off += 1
            with seen.around(preserve):
                return reentrant.apply(function, preserve, *args)

    names: dict[str, Any] = {"_checkpoint_without_reentrant_generator": watched, "CheckpointFunction": Watched}
    for name, stand_in in names.items():
        setattr(torch_checkpoint, name, stand_in)
    try:
        yield seen
    finally:
        for name, own in {"_checkpoint_without_reentrant_generator": plain, "CheckpointFunction": reentrant}.items():
            setattr(torch_checkpoint, name, own)
