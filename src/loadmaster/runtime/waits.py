"""Stages 1 and 2: a layer waits for its own weights, so that their gathers run behind the forward of those before it.

A hook before each layer waits for the buckets of the parameters it may read: all below it, or, for a module that
holds the blocks, its own alone. A parameter that some other module reads directly, so that no hook has seen it in
the first window, is waited for before every window instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from loadmaster.runtime.zero import ParameterBucket

__all__ = ["WeightWaits"]


class WeightWaits:
    """The hooks; `begin` is called before each window."""

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], weights: Sequence[ParameterBucket]) -> None:
        self._weights = list(weights)
        self._seen: set[int] = set()  # ids of buckets' parameters that a called layer covers
        self._early: list[ParameterBucket] | None = None
        self._windows = 0
        bucket_of = {id(p): w for w in weights for p in w.params}
        inside = {id(block) for block in blocks}
        self._hooks: list[Any] = []
        for layer in module.modules() if weights else ():
            holds_blocks = any(id(part) in inside for part in layer.modules() if part is not layer)
            params = [p for p in layer.parameters(recurse=not holds_blocks) if id(p) in bucket_of]
            if params:
                mine = list({id(w): w for w in (bucket_of[id(p)] for p in params)}.values())
                self._hooks.append(layer.register_forward_pre_hook(self._waiter(mine, [id(p) for p in params])))

    def begin(self) -> None:
        """Wait for what no layer waits for; in the first two windows, while that is learnt, for everything."""
        self._windows += 1
        if self._windows == 2:
            self._early = [w for w in self._weights if any(id(p) not in self._seen for p in w.params)]
        for bucket in self._weights if self._early is None else self._early:
            bucket.wait()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _waiter(self, weights: list[ParameterBucket], params: list[int]) -> Callable[[nn.Module, Any], None]:
        def wait(layer: nn.Module, args: Any) -> None:
            if self._early is None:
                self._seen.update(params)
            for bucket in weights:
                bucket.wait()

        return wait
