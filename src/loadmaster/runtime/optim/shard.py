"""Where a tensor given to an optimizer lies in its whole parameter, and what that parameter is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loadmaster.errors import InvalidInput
from loadmaster.program.codebook import is_coded

__all__ = ["ParameterShard", "embedding_parameters", "local_part", "shard_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShard:
    """Elements [start, stop) of the flattened parameter `name` of shape `full_shape`.

    >>> shard = ParameterShard(name="h.0.w", full_shape=(66, 256), start=8448, stop=16896)
    >>> shard.full_numel, shard.coded(4096)
    (16896, True)
    """

    name: str
    full_shape: tuple[int, ...]
    start: int
    stop: int
    is_embedding: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= self.full_numel:
            raise InvalidInput(
                f"shard of {self.name}", f"[{self.start}, {self.stop})", f"does not lie in {self.full_numel} elements",
                "give the range in the flattened whole parameter",
            )  # fmt: skip

    @property
    def numel(self) -> int:
        """Elements of the range."""
        return self.stop - self.start

    @property
    def full_numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.full_shape)

    def coded(self, min_elements: int) -> bool:
        """Whether its state may be 8-bit: decided on the whole parameter."""
        return is_coded(self.full_numel, is_embedding=self.is_embedding, min_elements=min_elements)

    def check_grid(self, block: int) -> None:
        """Refuse a range that cuts a block: its scale belongs to one owner.

        Raises:
            InvalidInput: start, or a stop before the end, is no multiple of `block`.
        """
        for edge in (self.start, self.stop):
            if edge % block and edge != self.full_numel:
                raise InvalidInput(
                    f"shard of {self.name}", f"[{self.start}, {self.stop})",
                    f"cuts a block of {block} elements at {edge}, and a block's scale is the maximum over all of it",
                    f"cut at multiples of {block} (codebook.aligned_ranges), or keep this parameter's state 32-bit",
                )  # fmt: skip


def local_part(x: Tensor) -> Tensor:
    """What this rank holds of `x`: of a DTensor its local tensor, else itself."""
    return x.to_local() if _is_dtensor(x) else x  # type: ignore[attr-defined]


def shard_of(p: Tensor, name: str, *, is_embedding: bool, may_code: bool) -> ParameterShard:
    """Where a tensor lies in its whole parameter: all of it, or a DTensor's rows.

    Args:
        p: the parameter.
        name: of it.
        is_embedding: its role.
        may_code: its group asks for 8-bit state; with 32-bit state any part of a tensor stands for itself.

    Raises:
        InvalidInput: the DTensor is not cut along its rows alone, so that what a rank holds is no flat range.
    """
    start, stop = 0, p.numel()
    if _is_dtensor(p):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)  # type: ignore[attr-defined]
        if tuple(shape[1:]) != tuple(p.shape[1:]):
            if not may_code:  # without a name: such a part cannot be written as a range of the whole
                return ParameterShard(name="", full_shape=tuple(shape), start=0, stop=math.prod(shape))
            raise InvalidInput(
                f"placements of {name or 'a parameter'}", p.placements,  # type: ignore[attr-defined]
                "do not cut along dimension 0 alone, so a rank's part is no flat range of the whole",
                "give its group state_bits=32",
            )  # fmt: skip
        row = math.prod(p.shape[1:])
        start = min(offset[0] * row, p.numel()) if math.prod(shape) else p.numel()
        stop = start + math.prod(shape)
    return ParameterShard(name=name, full_shape=tuple(p.shape), start=start, stop=stop, is_embedding=is_embedding)


def _is_dtensor(x: Tensor) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def embedding_parameters(modules: nn.Module | Iterable[nn.Module]) -> set[Tensor]:
    """Weights of every embedding in `modules` (a tied head is the same tensor, so it is among them)."""
    roots = [modules] if isinstance(modules, nn.Module) else list(modules)
    found = (m for root in roots for m in root.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return {m.weight for m in found}
