"""Which blocks a pipeline rank holds, in closed form and on columns of layouts, and which end of the model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadmaster.describe.model import Block, Model
from loadmaster.describe.stack import Stack
from loadmaster.laws.numbers import Number, ceil_div, clip, floor_div, lesser, where

__all__ = ["Placement", "place"]

V_SCHEDULES = ("zb_v", "dualpipe_v")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What one pipeline rank holds.

    Attributes:
        kinds: the model's kinds of block; chunks: layers of each kind, chunk by chunk.
        embedding, head: 1 where the rank holds that end of the model, else 0.
    """

    kinds: tuple[Block, ...]
    chunks: tuple[tuple[Number, ...], ...]
    embedding: Number
    head: Number

    @property
    def blocks(self) -> tuple[tuple[Block, Number], ...]:
        """(block, layers of it on the rank)."""
        return tuple((block, sum(chunk[k] for chunk in self.chunks)) for k, block in enumerate(self.kinds))

    @property
    def num_layers(self) -> Number:
        """Layers on the rank."""
        return sum(count for _, count in self.blocks)


def place(model: Model, stack: Stack, *, pp: Number, stage: Number, virtual_stages: Number, schedule: str) -> Placement:
    """Blocks of pipeline rank `stage`: every layer once, the longer slices first.

    Chunk c of rank i is slice ``c * pp + i`` of the model (counted from the other end on odd chunks of V schedules).
    """
    folded = schedule in V_SCHEDULES
    chunks: list[tuple[Number, ...]] = []
    for chunk in range(int(np.max(virtual_stages))):
        index = chunk * pp + (pp - 1 - stage if folded and chunk % 2 else stage)
        low, high = _slice(model, stack, index, pp * virtual_stages)
        present = where(chunk < virtual_stages, 1, 0)
        counts: list[Number] = []
        start = 0
        for _, repeat in model.blocks:
            counts.append((clip(high, start, start + repeat) - clip(low, start, start + repeat)) * present)
            start += repeat
        chunks.append(tuple(counts))
    last = where(virtual_stages % 2 == 0, 0, pp - 1) if folded else pp - 1
    return Placement(
        kinds=tuple(block for block, _ in model.blocks),
        chunks=tuple(chunks),
        embedding=where(stage == 0, 1, 0),
        head=where(stage == last, 1, 0),
    )


def _slice(model: Model, stack: Stack, index: Number, num_slices: Number) -> tuple[Number, Number]:
    """Layers [low, high) of slice `index` of `num_slices`."""
    if stack.placement == "cost":
        return _by_cost(model, index, num_slices), _by_cost(model, index + 1, num_slices)
    share = floor_div(model.num_layers, num_slices)
    rest = model.num_layers - share * num_slices
    return index * share + lesser(index, rest), (index + 1) * share + lesser(index + 1, rest)


def _by_cost(model: Model, index: Number, num_slices: Number) -> Number:
    """Layers before slice `index` where a block that crosses the threshold stays: nanotron's rule.

    ``min(L, ceil(index * (L c + V h) / (slices * c)))``, c the matrix elements of a block.
    """
    layers = model.num_layers
    each = max(1, sum(w.matmul_params for w in model.blocks[0][0].weights))
    head = sum(w.matmul_params for w in model.head.weights)
    return lesser(layers, ceil_div(index * (layers * each + head), num_slices * each))
