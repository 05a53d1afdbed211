"""The engine's state as flat ranges of whole tensors, out of any layout and into any other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from loadmaster.program.shards import split_range
from loadmaster.runtime.assembly import Assembly
from loadmaster.runtime.optim import Blockwise
from loadmaster.runtime.optimizer import Leaf
from loadmaster.runtime.state import ReadState, StateShard

__all__ = ["gradient_shards", "load_state", "state_shards"]


def state_shards(parts: Assembly) -> Iterator[StateShard]:
    """This rank's share; ranks that hold the same range share its writing, so that all together are whole once."""
    for leaf in parts.leaves:
        yield from _cut(parts, leaf, "param", leaf.weights.detach().view(-1))
        if leaf.separate and leaf.tensor.dtype != leaf.weights.dtype:
            yield from _cut(parts, leaf, "master", leaf.tensor.detach().view(-1))
        if leaf.ema is not None:
            yield from _cut(parts, leaf, "ema", leaf.ema.view(-1))
        for kind, value in _optimizer_state(parts, leaf).items():
            if value.dim() > 0:
                yield from _cut(parts, leaf, kind, value.detach().reshape(-1), grain=_grain(parts, kind))
            elif leaf.range.start == 0 and _writes_whole(parts):
                yield StateShard(name=leaf.range.name, kind=kind, full_shape=(), start=0, stop=1, tensor=value.view(1))
    yield from _untrained(parts)


def gradient_shards(parts: Assembly) -> Iterator[StateShard]:
    """The reduced, unscaled, clipped gradients of the last window."""
    for leaf in parts.leaves:
        yield from _cut(parts, leaf, "grad", leaf.gradient.reshape(-1))


def load_state(parts: Assembly, read: ReadState) -> None:
    """Fill everything `state_shards` would yield from `read`; what it does not have stays as it is."""
    _make_optimizer_state(parts)
    with torch.no_grad():
        for leaf in parts.leaves:
            _load_leaf(parts, leaf, read)
        for name, kind, tensor in _whole_tensors(parts):
            _fill(tensor.view(-1), read(name, kind, 0, tensor.numel()))
        _load_frozen_shards(parts, read)
    parts.publish()
    parts.wait_for_weights()


def _load_leaf(parts: Assembly, leaf: Leaf, read: ReadState) -> None:
    name, start, stop = leaf.range.name, leaf.range.start, leaf.range.stop
    _fill(leaf.weights.detach().view(-1), read(name, "param", start, stop))
    if leaf.separate:
        master = read(name, "master", start, stop) if leaf.tensor.dtype != leaf.weights.dtype else None
        leaf.tensor.copy_(leaf.weights if master is None else master.view(leaf.tensor.shape))
    if leaf.ema is not None:
        _fill(leaf.ema.view(-1), read(name, "ema", start, stop))
    for kind, value in _optimizer_state(parts, leaf).items():
        if value.dim() > 0:
            grain = _grain(parts, kind)
            _fill(value.view(-1), read(name, kind, start // grain, -(-stop // grain)))
        else:
            _fill(value.view(1), read(name, kind, 0, 1))


def _fill(tensor: Tensor, value: Tensor | None) -> None:
    if value is not None:
        tensor.copy_(value.view(-1))


def _optimizer_state(parts: Assembly, leaf: Leaf) -> dict[str, Tensor]:
    state: dict[str, Any] = parts.optimizer.state.get(leaf.tensor, {})
    return {k: v for k, v in state.items() if isinstance(v, Tensor)}


def _make_optimizer_state(parts: Assembly) -> None:
    """Optimizers make their state in the first step; take one with no gradient and no learning rate."""
    if isinstance(parts.optimizer, Blockwise):
        if not parts.optimizer.state:
            parts.optimizer.initialise()
        return
    bare = [leaf for leaf in parts.leaves if not parts.optimizer.state.get(leaf.tensor)]
    if not bare:
        return
    kept = [(group, group["lr"]) for group in parts.optimizer.param_groups]
    before = [leaf.tensor.detach().clone() for leaf in bare]
    for leaf in bare:
        leaf.tensor.grad = torch.zeros_like(leaf.tensor)
    for group, _ in kept:
        group["lr"] = group["lr"] * 0
    parts.optimizer.step()
    for group, lr in kept:
        group["lr"] = lr
    with torch.no_grad():
        for leaf, value in zip(bare, before, strict=True):
            leaf.drop_gradient()
            leaf.tensor.copy_(value)
            for state in _optimizer_state(parts, leaf).values():
                if state.numel() == 1:
                    state.zero_()


def _cut(parts: Assembly, leaf: Leaf, kind: str, flat: Tensor, *, grain: int = 1) -> Iterator[StateShard]:
    """The piece of the leaf's range that this rank writes; `grain` elements of the parameter share one of `flat`."""
    copies, index = _copies(parts)
    base = leaf.range.start // grain
    start, stop = split_range(base, -(-leaf.range.stop // grain), copies, index)
    shape = leaf.full_shape if grain == 1 else (-(-math.prod(leaf.full_shape) // grain),)
    if start < stop:
        yield StateShard(
            name=leaf.range.name, kind=kind, full_shape=shape, start=start, stop=stop,
            tensor=flat[start - base : stop - base],
        )  # fmt: skip


def _grain(parts: Assembly, kind: str) -> int:
    """Elements of a parameter that share one element of its state: a block of 8-bit codes shares a scale."""
    return parts.optimizer.block if kind.endswith("_scale") and isinstance(parts.optimizer, Blockwise) else 1


def _copies(parts: Assembly) -> tuple[int, int]:
    """(ranks that hold the same range, this one's place among them)."""
    if parts.stage == 0:
        return parts.mesh.data.size, parts.mesh.data.rank
    return parts.mesh.replicate.size, parts.mesh.replicate.rank


def _writes_whole(parts: Assembly) -> bool:
    return _copies(parts)[1] == 0


def _whole_tensors(parts: Assembly) -> Iterator[tuple[str, str, Tensor]]:
    """Frozen parameters that every rank holds whole, and persistent buffers."""
    if parts.stage != 3:
        for row in parts.table.rows:
            if not row.trainable:
                yield row.name, "param", parts.named[row.name].detach()
    persistent = set(parts.module.state_dict(keep_vars=True))
    for name, buffer in parts.module.named_buffers():
        if name in persistent:
            yield name, "buffer", buffer


def _untrained(parts: Assembly) -> Iterator[StateShard]:
    size, rank = parts.mesh.data.size, parts.mesh.data.rank
    for name, kind, tensor in _whole_tensors(parts):
        start, stop = split_range(0, tensor.numel(), size, rank)
        if start < stop:
            flat = tensor.reshape(-1)[start:stop]
            yield StateShard(name=name, kind=kind, full_shape=tuple(tensor.shape), start=start, stop=stop, tensor=flat)
    for weight in parts.weights:
        if not weight.table.trainable:
            for place in weight.ranges():
                low, high = split_range(place.start, place.stop, *_copies(parts))
                at = place.offset + low - place.start
                yield StateShard(
                    name=place.name, kind="param", full_shape=tuple(parts.named[place.name].shape), start=low,
                    stop=high, tensor=weight.shard[at : at + high - low],
                )  # fmt: skip


def _load_frozen_shards(parts: Assembly, read: ReadState) -> None:
    for weight in parts.weights:
        if not weight.table.trainable:
            for place in weight.ranges():
                piece = weight.shard[place.offset : place.offset + place.numel]
                _fill(piece, read(place.name, "param", place.start, place.stop))
