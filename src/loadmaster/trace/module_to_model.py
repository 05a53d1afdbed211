"""Any module as a `Model`: exact parameters, FLOPs and saved bytes by submodule, boundary tensors of its blocks.

So that modules no family knows (conv nets, encoder-decoders, diffusion UNets) can be priced and planned on the data,
shard, pipeline, recompute and precision axes; nothing says how tensor parallelism would split them. Shapes beyond the
batch are those of the inputs given: bytes and FLOPs grow with the number of samples alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import nn

from loadmaster.describe.model import Block, Model
from loadmaster.describe.op import Op, OpKind, Value, ValueType, Weight
from loadmaster.errors import InvalidInput
from loadmaster.trace.api import trace
from loadmaster.trace.recompute import repeated_blocks
from loadmaster.trace.timeline import Storage, Timeline

__all__ = ["TRACED", "load_factory", "model_from_module"]

TRACED = "traced"
_TYPES = {"int64": ValueType.INT64, "int32": ValueType.INT32, "bool": ValueType.BOOL}
_ITEM = {"int64": 8, "int32": 4, "bool": 1, "uint8": 1, "float64": 8, "bfloat16": 2, "float16": 2}


def load_factory(target: str) -> Callable[[], Any]:
    """What ``package.module:function`` names; the working folder is importable.

    Raises:
        InvalidInput: it cannot be imported, or is no function.
    """
    name, _, attribute = target.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(import_module(name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput("factory", target, f"cannot be found ({error})", "check the name; it must import") from None
    finally:
        sys.path.pop(0)
    if not callable(made):
        raise InvalidInput("factory", target, "cannot be called", "name a function that returns (module, inputs)")
    return made  # type: ignore[no-any-return]


def model_from_module(module: nn.Module | Callable[[], Any], inputs: Any = (), *, name: str = "") -> Model:
    """Trace one step and read the op table off it.

    Raises:
        Untraceable: as `trace`.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 2)
    ...     def forward(self, x):
    ...         for layer in self.layers:
    ...             x = layer(x)
    ...         return self.head(x)
    >>> model = model_from_module(Net(), torch.zeros(4, 8))
    >>> model.num_params, model.num_layers, model.blocks[0][0].ops[0].flops
    (234, 3, 128.0)
    """
    survey = _Survey()
    step = trace(module, inputs, optimizer=None, steps=1, survey=survey)
    return survey.model(step, name or step.name)


@dataclass(slots=True)
class _Survey:
    """What is read off the module while it runs."""

    weights: dict[str, list[Weight]] | None = None
    paths: tuple[str, ...] = ()  # of the repeated blocks, in order of their first run
    boundary: dict[str, tuple[int, str]] | None = None  # elements a sample and dtype of each block's input
    samples: int = 1
    seq_len: int = 1

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the module before it runs."""
        first = next((t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)), None)
        if first is not None and first.ndim:
            self.samples = first.shape[0]
            self.seq_len = first.shape[1] if first.ndim == 2 and not first.dtype.is_floating_point else 1
        self.weights = _weights(module)
        names = {id(m): path for path, m in module.named_modules()}
        order: list[str] = []
        boundary: dict[str, tuple[int, str]] = {}

        def seen(path: str) -> Callable[..., None]:
            def hook(_: nn.Module, positional: Any, named: Any) -> None:
                if path in boundary:
                    return
                tensor = next((t for t in (*positional, *named.values()) if isinstance(t, torch.Tensor)), None)
                order.append(path)
                self.paths = tuple(order)
                boundary[path] = (
                    (tensor.numel() // self.samples, str(tensor.dtype)) if tensor is not None else (1, "float32")
                )

            return hook

        self.boundary = boundary
        for _, blocks in repeated_blocks(module):
            for block in blocks:
                block.register_forward_pre_hook(seen(names[id(block)]), with_kwargs=True)

    def model(self, step: Timeline, name: str) -> Model:
        """The table."""
        assert self.weights is not None
        assert self.boundary is not None
        places = _places(self.paths, step, self.weights)
        tables = [_block(p, places[p], step, self) for p in self.paths]
        embedding = replace(_block("", places["<before>"], step, self), name="embedding")
        head = replace(_block("", places["<after>"], step, self), name="head")
        width = max((self.boundary[p][0] for p in self.paths), default=1)
        return Model(
            name=name, family=TRACED, hidden_size=max(1, width // self.seq_len), vocab_size=1, embedding=embedding,
            blocks=_grouped(tables), head=head, fixed_seq_len=self.seq_len,
        )  # fmt: skip


def _weights(module: nn.Module) -> dict[str, list[Weight]]:
    """Every parameter once under the path of its module; a tied one names the first."""
    first: dict[int, str] = {}
    found: dict[str, list[Weight]] = {}
    for path, child in module.named_modules():
        for key, tensor in child.named_parameters(recurse=False):
            full = f"{path}.{key}" if path else key
            found.setdefault(path, []).append(
                Weight(
                    name=full, shape=tuple(tensor.shape) or (1,), trainable=tensor.requires_grad,
                    multiplies=tensor.ndim == 2 and not isinstance(child, nn.Embedding), tied_to=first.get(id(tensor)),
                )
            )  # fmt: skip
            first.setdefault(id(tensor), full)
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    """What one submodule of a block has."""

    path: str
    weights: tuple[Weight, ...]
    saved: tuple[Storage, ...]
    flops: int


def _places(paths: tuple[str, ...], step: Timeline, weights: dict[str, list[Weight]]) -> dict[str, dict[str, _Part]]:
    """By block (or before, after all blocks): submodule path to its weights, saved tensors and FLOPs."""
    runs = [e.index for e in step.events if e.phase == "forward" and _owner(e.module, paths)]
    start = runs[0] if runs else len(step.events)
    table: dict[str, dict[str, _Part]] = {p: {} for p in (*paths, "<before>", "<after>")}

    def place(path: str, event: int) -> dict[str, _Part]:
        return table[_owner(path, paths) or ("<before>" if event < start else "<after>")]

    first_event: dict[str, int] = {}
    for event in step.events:
        if event.phase == "forward":
            first_event.setdefault(event.module, event.index)
            count = step.flops.get(event.index, 0)
            if count:
                _add(place(event.module, event.index), event.module, flops=count)
    for path, owned in weights.items():
        _add(place(path, first_event.get(path, 0)), path, weights=tuple(owned))
    for storage in step.saved():
        path = storage.saved_by.rpartition(" ")[0] if " " in storage.saved_by else ""
        _add(place(path, storage.saved_from or 0), path, saved=(storage,))
    return table


def _add(
    parts: dict[str, _Part], path: str, *, weights: tuple[Weight, ...] = (), saved: tuple[Storage, ...] = (),
    flops: int = 0,
) -> None:  # fmt: skip
    before = parts.get(path, _Part(path, (), (), 0))
    parts[path] = _Part(path, before.weights + weights, before.saved + saved, before.flops + flops)


def _owner(path: str, blocks: Iterable[str]) -> str:
    """The repeated block that `path` lies in."""
    return next((b for b in blocks if path == b or path.startswith(b + ".")), "")


def _block(path: str, parts: dict[str, _Part], step: Timeline, survey: _Survey) -> Block:
    """One op a submodule, in a chain from the block's input to its output."""
    assert survey.boundary is not None
    width, _ = survey.boundary.get(path, (1, ""))
    values = [_value("input", width, ValueType.COMPUTE), _value("output", width, ValueType.COMPUTE)]
    ops: list[Op] = []
    prefix = f"{path}." if path else ""
    last = "input"
    for part in parts.values():
        short = part.path.removeprefix(prefix) if part.path != path else ""
        made = [_saved_value(f"{short or 'own'}.saved{i}", s, survey.samples) for i, s in enumerate(part.saved)]
        values += made
        ops.append(
            Op(
                name=short or "own", kind=OpKind.OTHER, function=TRACED, inputs=(last,),
                outputs=tuple(v.name for v in made), flops=part.flops / survey.samples,
                weights=tuple(replace(w, name=w.name.removeprefix(prefix)) for w in part.weights),
            )
        )  # fmt: skip
        last = made[-1].name if made else last
    ops.append(Op(name="output", kind=OpKind.OTHER, inputs=(last,), outputs=("output",), flops=0.0))
    return Block(name="block", prefix=prefix, ops=tuple(ops), values=tuple(values), input="input", output="output")


def _value(name: str, width: int, kind: ValueType) -> Value:
    return Value(name=name, width=max(1, width), batch_power=1, seq_power=0, type=kind)


def _saved_value(name: str, storage: Storage, samples: int) -> Value:
    """A saved tensor as elements a sample; one that does not grow with the batch has no power of it."""
    kind = _TYPES.get(storage.dtype, ValueType.BOOL if storage.dtype == "uint8" else ValueType.COMPUTE)
    elements = storage.bytes // _ITEM.get(storage.dtype, 4)
    if elements % samples:
        return Value(name=name, width=max(1, elements), batch_power=0, seq_power=0, type=kind)
    return _value(name, elements // samples, kind)


def _grouped(blocks: list[Block]) -> tuple[tuple[Block, int], ...]:
    """Equal neighbours under one list become one block and its number of repeats."""
    grouped: list[tuple[Block, int]] = []
    for block in blocks:
        stem, _, index = block.prefix.rstrip(".").rpartition(".")
        generic = replace(block, prefix=f"{stem}.{{}}." if stem else "{}.", first_index=int(index))
        if grouped and _same(grouped[-1], generic):
            grouped[-1] = (grouped[-1][0], grouped[-1][1] + 1)
        else:
            grouped.append((generic, 1))
    return tuple(grouped)


def _same(group: tuple[Block, int], block: Block) -> bool:
    known, repeat = group
    return known.first_index + repeat == block.first_index and known == replace(block, first_index=known.first_index)
