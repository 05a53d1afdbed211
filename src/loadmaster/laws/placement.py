"""Which blocks a pipeline rank holds, in closed form and on columns of layouts, and which end of the model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadmaster.describe.model import Block, Model
from loadmaster.describe.stack import Stack
from loadmaster.laws.numbers import Number, ceil_div, clip, lesser, where

__all__ = ["Placement", "place"]

V_SCHEDULES = ("zb_v", "dualpipe_v")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What one pipeline rank holds.

    Attributes:
        blocks: (block, number of layers of it on this rank).
        embedding, head: 1 where it holds that end of the model, else 0.
    """

    blocks: tuple[tuple[Block, Number], ...]
    embedding: Number
    head: Number

    @property
    def num_layers(self) -> Number:
        """Layers on this rank."""
        return sum(count for _, count in self.blocks)


def place(model: Model, stack: Stack, *, pp: Number, stage: Number, virtual_stages: Number, schedule: str) -> Placement:
    """Blocks of pipeline rank `stage`: ``ceil`` shares first, every layer once.

    Chunk c of rank i is slice ``c * pp + i`` of the model (folded back on odd chunks for V schedules).
    """
    counts: list[Number] = [0] * len(model.blocks)
    folded = schedule in V_SCHEDULES
    for chunk in range(int(np.max(virtual_stages))):
        index = chunk * pp + (pp - 1 - stage if folded and chunk % 2 else stage)
        low, high = _slice(model, stack, index, pp * virtual_stages)
        start = 0
        for k, (_, repeat) in enumerate(model.blocks):
            inside = clip(high, start, start + repeat) - clip(low, start, start + repeat)
            counts[k] = counts[k] + where(chunk < virtual_stages, inside, 0)
            start += repeat
    head_rank = where(virtual_stages % 2 == 0, 0, pp - 1) if folded else pp - 1
    return Placement(
        blocks=tuple((block, count) for (block, _), count in zip(model.blocks, counts, strict=True)),
        embedding=where(stage == 0, 1, 0), head=where(stage == head_rank, 1, 0),
    )  # fmt: skip


def _slice(model: Model, stack: Stack, index: Number, num_slices: Number) -> tuple[Number, Number]:
    """Layers [low, high) of slice `index` of `num_slices`."""
    layers = model.num_layers
    if stack.placement == "cost":
        return _by_cost(model, index, num_slices), _by_cost(model, index + 1, num_slices)
    share, rest = layers // num_slices, layers % num_slices
    return (index * share + lesser(index, rest), (index + 1) * share + lesser(index + 1, rest))


def _by_cost(model: Model, index: Number, num_slices: Number) -> Number:
    """Layers before slice `index` where a block that crosses the threshold stays: nanotron's rule.

    ``min(L, ceil(index * (L c + V h) / (slices * c)))``, c the matrix elements of a block.
    """
    layers = model.num_layers
    each = max(1, sum(w.matmul_params for w in model.blocks[0][0].weights))
    head = sum(w.matmul_params for w in model.head.weights)
    return lesser(layers, ceil_div(index * (layers * each + head), num_slices * each))
