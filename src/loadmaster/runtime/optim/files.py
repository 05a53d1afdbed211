"""Optimizer state on disk: safetensors, named by whole parameters and ranges, so that any sharding can read it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loadmaster.errors import InvalidInput, MissingDependency
from loadmaster.program.codebook import num_blocks
from loadmaster.runtime.optim.rules import MOMENTS
from loadmaster.runtime.optim.state import load_parameter

if TYPE_CHECKING:
    from loadmaster.runtime.optim.optimizer import Blockwise

__all__ = ["Piece", "load_pieces", "load_state", "pieces", "save_state"]

FORMAT = "loadmaster optimizer state 1"
Path = str | PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A flat range of one whole state tensor.

    Attributes:
        name: the parameter; kind: ``step``, a moment, or a moment's ``_scale``.
        full_numel: elements of the whole tensor (of a scale: blocks).
        start, stop: the range; tensor: its elements.
        block: elements a scale; 0 for 32-bit state.
    """

    name: str
    kind: str
    full_numel: int
    start: int
    stop: int
    tensor: Tensor
    block: int


def pieces(optimizer: Blockwise) -> Iterator[Piece]:
    """Everything an optimizer holds, as ranges of whole tensors: the same set whatever the sharding."""
    for p, state in optimizer.state.items():
        shard = optimizer.shards[p]
        if not shard.name:
            raise InvalidInput("optimizer.params", "a parameter without a name", "cannot be named in a file",
                               "build the optimizer from the module or from named_parameters()")  # fmt: skip
        for kind, tensor in state.items():
            start, stop, full, block = shard.start, shard.stop, shard.full_numel, 0
            if kind == "step":
                start, stop, full = 0, 1, 1
            elif kind.endswith("_scale") or f"{kind}_scale" in state:
                block = optimizer.block
            if kind.endswith("_scale"):
                start, stop, full = start // block, num_blocks(stop, block), num_blocks(full, block)
            yield Piece(name=shard.name, kind=kind, full_numel=full, start=start, stop=stop, tensor=tensor, block=block)


def save_state(optimizer: Blockwise, path: Path) -> None:
    """Write this rank's state to one safetensors file; nothing is pickled.

    Raises:
        InvalidInput: a parameter has no name.
        MissingDependency: safetensors is not installed.
    """
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise MissingDependency("saving optimizer state", "safetensors", "runtime") from None
    tensors, table = {}, {}
    for piece in pieces(optimizer):
        key = f"{piece.name}|{piece.kind}|{piece.start}:{piece.stop}"
        tensors[key] = piece.tensor.detach().reshape(-1).cpu().contiguous()
        table[key] = {"full_numel": piece.full_numel, "block": piece.block}
    skip = {"params", "param_names"}
    groups = [{k: _plain(v) for k, v in g.items() if k not in skip} for g in optimizer.param_groups]
    about = {"format": FORMAT, "optimizer": type(optimizer).__name__, "pieces": json.dumps(table)}
    save_file(tensors, fspath(path), metadata={**about, "groups": json.dumps(groups)})


def load_state(optimizer: Blockwise, paths: Path | Iterable[Path], *, convert: bool = False) -> None:
    """Read the files that all ranks of a run wrote, and take from them what this rank holds.

    Raises:
        InvalidInput: a file is of another kind of optimizer, a range is missing, or bits or block disagree.
    """
    from safetensors import safe_open

    files = [paths] if isinstance(paths, str | PathLike) else list(paths)
    found: list[Piece] = []
    for path in files:
        with safe_open(fspath(path), framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT or about.get("optimizer") != type(optimizer).__name__:
                raise InvalidInput(
                    f"file {fspath(path)}", about.get("optimizer", "no optimizer state"),
                    f"is not the state of {type(optimizer).__name__}", "give the files of this optimizer's run",
                )  # fmt: skip
            table: dict[str, Any] = json.loads(about["pieces"])
            for key, entry in table.items():
                name, kind, edges = key.rsplit("|", 2)
                start, stop = map(int, edges.split(":"))
                found.append(Piece(name=name, kind=kind, start=start, stop=stop, tensor=file.get_tensor(key), **entry))
            for group, saved in zip(optimizer.param_groups, json.loads(about["groups"]), strict=False):
                group.update({k: v for k, v in saved.items() if k not in ("state_bits", "block")})
    load_pieces(optimizer, found, convert=convert)


@torch.no_grad()
def load_pieces(optimizer: Blockwise, found: Iterable[Piece], *, convert: bool = False) -> None:
    """Fill the optimizer's ranges from pieces of any sharding; a parameter nobody saved keeps no state.

    Raises:
        InvalidInput: a needed range is missing, or bits or block disagree and `convert` is off.
    """
    by_place: dict[tuple[str, str], list[Piece]] = {}
    for piece in found:
        by_place.setdefault((piece.name, piece.kind), []).append(piece)
    for group in optimizer.param_groups:
        for p in group["params"]:
            shard = optimizer.shards[p]
            steps = by_place.get((shard.name, "step"))
            optimizer.state.pop(p, None)
            if not steps:
                continue
            saved: dict[str, Any] = {"step": steps[0].tensor.reshape(())}
            block = 0
            for name, _ in MOMENTS[optimizer.rule]:
                data = by_place.get((shard.name, name), [])
                saved[name] = _gather(shard.name, name, data, shard.start, shard.stop)
                if scales := by_place.get((shard.name, f"{name}_scale")):
                    block = scales[0].block
                    _check_cut(shard.name, shard.start, block)
                    first, last = shard.start // block, num_blocks(shard.stop, block)
                    saved[f"{name}_scale"] = _gather(shard.name, f"{name}_scale", scales, first, last)
            if block and block != optimizer.block and not convert and optimizer.is_coded(p):
                raise InvalidInput(
                    f"state of {shard.name}.block", block, f"disagrees with the optimizer's block={optimizer.block}",
                    f"build the optimizer with block={block}, or convert=True",
                )  # fmt: skip
            load_parameter(optimizer, group, p, saved, block or optimizer.block, convert=convert)


def _check_cut(name: str, start: int, block: int) -> None:
    if start % block:
        raise InvalidInput(
            f"state of {name}.block", block, f"does not begin at element {start}, where this rank's range does",
            f"cut ranges at multiples of {block}",
        )  # fmt: skip


def _gather(name: str, kind: str, found: list[Piece], start: int, stop: int) -> Tensor:
    """Elements [start, stop) put together from pieces."""
    have = start
    parts: list[Tensor] = []
    for piece in sorted(found, key=lambda q: (q.start, -q.stop)):
        if piece.start <= have < piece.stop and have < stop:
            parts.append(piece.tensor[have - piece.start : min(stop, piece.stop) - piece.start])
            have = min(stop, piece.stop)
    if have < stop:
        raise InvalidInput(
            f"state of {name}.{kind}", f"[{have}, {stop})", "is in none of the files",
            "give the files of every rank",
        )  # fmt: skip
    if parts:
        return torch.cat(parts)
    return found[0].tensor[:0] if found else torch.empty(0)


def _plain(value: Any) -> Any:
    """Tensors (rates) as numbers, so that options can be written as text."""
    return value.item() if isinstance(value, Tensor) else value
