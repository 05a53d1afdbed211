"""Puts repeated blocks under a non-reentrant checkpoint, as a user who turns recomputation on would."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from loadmaster.errors import InvalidInput

__all__ = ["recompute_blocks", "repeated_blocks"]


def repeated_blocks(module: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """Every list of two or more modules of one class: (its path, its modules).

    Of nested lists the outer one counts, unless all it holds are such lists themselves (the stages of a ResNet).

    >>> repeated_blocks(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])}))[0][0]
    'layers'
    """
    found: list[tuple[str, list[nn.Module]]] = []
    for path, candidate in module.named_modules():
        inside = any(path.startswith(f"{p}." if p else "") for p, _ in found)
        if not inside and _repeats(candidate) and not all(_repeats(child) for child in candidate.children()):
            found.append((path, list(candidate.children())))
    return found


def _repeats(candidate: nn.Module) -> bool:
    children = list(candidate.children())
    listed = isinstance(candidate, nn.ModuleList | nn.Sequential)
    return listed and len(children) > 1 and len({type(c) for c in children}) == 1


def recompute_blocks(module: nn.Module, recompute: str) -> None:
    """Wrap the forward of each repeated block.

    Raises:
        InvalidInput: unknown mode, or no repeated block to wrap.
    """
    if recompute == "none":
        return
    if recompute != "full":
        raise InvalidInput("recompute", recompute, "is not known to trace", "use none or full")
    lists = repeated_blocks(module)
    if not lists:
        raise InvalidInput(
            "recompute", "full", "finds no repeated blocks (a ModuleList or Sequential of one class)",
            "put torch.utils.checkpoint into the module itself",
        )  # fmt: skip
    for _, blocks in lists:
        for block in blocks:
            forward: Any = block.forward
            block.forward = functools.partial(checkpoint, forward, use_reentrant=False)
