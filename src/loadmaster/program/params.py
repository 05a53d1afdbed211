"""The parameter table: every parameter's name, shape, layer, and whether it trains or shares another's storage."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from loadmaster.describe.model import Model
from loadmaster.describe.op import Split

__all__ = ["EMBEDDING", "HEAD", "Parameter", "ParameterTable"]

EMBEDDING, HEAD = -1, -2  # `layer` of what lies outside the blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One row.

    Attributes:
        name: full state-dict name.
        shape: as held on one rank before data-parallel sharding.
        layer: block index, `EMBEDDING` or `HEAD`.
        trainable: it takes a gradient.
        tied_to: name of the parameter whose storage it shares; it then holds nothing of its own.
        group: what must not share a flat buffer, e.g. the dtype.
    """

    name: str
    shape: tuple[int, ...]
    layer: int = HEAD
    trainable: bool = True
    tied_to: str | None = None
    group: str = ""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ParameterTable:
    """Rows in the order of the forward.

    >>> table = ParameterTable.from_named([("a", (2, 3), 0, True), ("b", (4,), 1, False)])
    >>> table.num_params, table.num_trainable_params
    (10, 6)
    """

    rows: tuple[Parameter, ...]

    def __post_init__(self) -> None:
        names = [row.name for row in self.rows]
        assert len(set(names)) == len(names), "a parameter is listed twice"

    @classmethod
    def from_named(cls, named: Iterable[tuple[str, tuple[int, ...], int, bool]], group: str = "") -> ParameterTable:
        """From (name, shape, layer, trainable), as a runtime knows its parameters."""
        return cls(tuple(Parameter(name=n, shape=s, layer=layer, trainable=t, group=group) for n, s, layer, t in named))

    @classmethod
    def from_model(cls, model: Model, *, tp: int = 1) -> ParameterTable:
        """From a described model; weights that tensor parallelism divides are held as one rank of `tp` holds them.

        >>> from loadmaster.program.params import ParameterTable
        >>> import loadmaster as lm                                           # doctest: +SKIP
        >>> ParameterTable.from_model(lm.Model.from_hf("gpt2")).num_params    # doctest: +SKIP
        124439808
        """
        return _from_model(model, tp)

    @property
    def stored(self) -> tuple[Parameter, ...]:
        """Rows that hold elements of their own."""
        return tuple(row for row in self.rows if row.tied_to is None)

    @property
    def trained(self) -> tuple[Parameter, ...]:
        """Rows that take a gradient of their own."""
        return tuple(row for row in self.stored if row.trainable)

    @property
    def num_params(self) -> int:
        """Elements, a tied matrix once."""
        return sum(row.numel for row in self.stored)

    @property
    def num_trainable_params(self) -> int:
        """Elements that take a gradient."""
        return sum(row.numel for row in self.trained)


@lru_cache(maxsize=8)
def _from_model(model: Model, tp: int) -> ParameterTable:
    """The table, made once: pricing a layout and its neighbours asks for the same one many times."""
    rows: list[Parameter] = []
    first = 0
    for kind, (block, repeat) in _kinds(model):
        for i in range(repeat):
            layer = first + i if kind == "block" else (EMBEDDING if kind == "embedding" else HEAD)
            for weight in block.weights:
                name = block.prefix.format(block.first_index + i) + weight.name
                shape = list(weight.shape)
                if weight.split is Split.TP:
                    shape[weight.split_dim] = -(-shape[weight.split_dim] // tp)
                full = (weight.num_experts, *shape) if weight.stacked else tuple(shape)
                copies = 1 if weight.stacked else weight.num_experts
                names = [name.replace("*", str(e)) for e in range(copies)] if copies > 1 else [name]
                rows += [
                    Parameter(name=n, shape=full, layer=layer, trainable=weight.trainable, tied_to=weight.tied_to)
                    for n in names
                ]
        first += repeat if kind == "block" else 0
    return ParameterTable(tuple(rows))


def _kinds(model: Model) -> list[tuple[str, tuple]]:  # type: ignore[type-arg]
    return [
        ("embedding", (model.embedding, 1)),
        *(("block", pair) for pair in model.blocks),
        ("head", (model.head, 1)),
    ]
