"""A checkpoint on disk, free of any layout: names, whole shapes, flat ranges; read on whatever ranks come.

A folder ``step-00000100`` holds ``checkpoint.json`` (what there is, where it lies, checksums, the run's own facts)
and safetensors files, one a rank that saved. ``latest`` beside it names the newest whole one. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from loadmaster.errors import InvalidInput
from loadmaster.runtime.whole import MANIFEST

__all__ = ["Checkpoint", "Shard", "checksum", "gaps", "seal"]

FORMAT, VERSION = "loadmaster-checkpoint", 1
WAY_OUT = "resume from another checkpoint (--resume FOLDER)"


class Shard(Protocol):
    """A flat range of one tensor of the state, as the engine yields it.

    Attributes:
        name, kind: of the parameter, and which of its tensors (``param``, ``exp_avg``, ...).
        full_shape: of the whole tensor; start, stop: the range held here, in its flat elements.
        tensor: the range, ``stop - start`` elements.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def full_shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def start(self) -> int: ...  # noqa: D102
    @property
    def stop(self) -> int: ...  # noqa: D102
    @property
    def tensor(self) -> Tensor: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class _Part:
    """A saved range: where it lies and the checksum of its bytes."""

    start: int
    stop: int
    file: str
    key: str
    checksum: str


@dataclass(slots=True)
class Checkpoint:
    """An opened checkpoint; `read` fetches ranges, verified.

    Attributes:
        folder: where it lies.
        step: optimizer steps done.
        run: facts the run put there (data position, seed, schedule, scaler, model).
        shapes: (kind, name) to whole shape.
    """

    folder: Path
    step: int
    run: Mapping[str, Any]
    shapes: Mapping[tuple[str, str], tuple[int, ...]]
    parts: Mapping[tuple[str, str], tuple[_Part, ...]]
    _files: dict[str, Any] = field(default_factory=dict)
    _verified: set[tuple[str, str]] = field(default_factory=set)

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read the manifest.

        Raises:
            InvalidInput: no checkpoint there, or a damaged one.
        """
        try:
            body = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidInput("checkpoint", str(folder), f"holds none ({error.strerror})", WAY_OUT) from None
        except ValueError:
            raise InvalidInput("checkpoint", str(folder / MANIFEST), "is damaged: no JSON", WAY_OUT) from None
        if not isinstance(body, dict) or body.get("format") != FORMAT or body.get("version") != VERSION:
            raise InvalidInput("checkpoint", str(folder), f"is not of the form {FORMAT} {VERSION}", WAY_OUT)
        if body.get("seal") != seal(body):
            raise InvalidInput("checkpoint", str(folder / MANIFEST), "is damaged: its checksum is wrong", WAY_OUT)
        shapes, parts = {}, {}
        for entry in body["tensors"]:
            at = entry["kind"], entry["name"]
            shapes[at] = tuple(entry["shape"])
            parts[at] = tuple(_Part(**part) for part in entry["parts"])
        return cls(folder, body["step"], body["run"], shapes, parts)

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor | None:
        """Flat elements start..stop of a tensor, put together from the ranges that ranks saved; None: not saved.

        Raises:
            InvalidInput: a range is missing or its bytes are not those that were saved.
        """
        parts = self.parts.get((kind, name))
        if parts is None:
            return None
        found = [(max(p.start, start), min(p.stop, stop), p) for p in parts if p.start < stop and p.stop > start]
        if lacking := gaps([(low, high) for low, high, _ in found], start, stop):
            raise InvalidInput("checkpoint", f"{self.folder}: {kind} of {name}", f"lacks elements {lacking}", WAY_OUT)
        pieces = [(low, high, self._piece(p, low, high)) for low, high, p in found]
        if len(pieces) == 1:
            return pieces[0][2]
        out = torch.empty(stop - start, dtype=pieces[0][2].dtype if pieces else torch.float32)
        for low, high, piece in pieces:
            out[low - start : high - start] = piece
        return out

    def whole(self, name: str, kind: str = "param") -> Tensor:
        """A whole tensor in its shape."""
        shape = self.shapes[kind, name]
        flat = self.read(name, kind, 0, math.prod(shape))
        assert flat is not None
        return flat.view(shape)

    def _piece(self, part: _Part, low: int, high: int) -> Tensor:
        at = part.file, part.key
        try:
            if part.file not in self._files:
                self._files[part.file] = safe_open(str(self.folder / part.file), framework="pt")
            if at not in self._verified:
                if checksum(self._files[part.file].get_tensor(part.key)) != part.checksum:
                    raise ValueError("its bytes are not those that were saved")
                self._verified.add(at)
            piece: Tensor = self._files[part.file].get_slice(part.key)[low - part.start : high - part.start]
        except Exception as error:  # safetensors raises its own type, not exported
            raise InvalidInput(
                "checkpoint", f"{self.folder / part.file}: {part.key}", f"is damaged ({error})", WAY_OUT
            ) from None
        return piece


def checksum(tensor: Tensor) -> str:
    """BLAKE2b of a tensor's bytes, 16 bytes in hex."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()


def seal(body: Mapping[str, Any]) -> str:
    """Checksum of a manifest less its own seal."""
    text = json.dumps({k: v for k, v in body.items() if k != "seal"}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def gaps(ranges: Iterable[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """What of start..stop no range covers.

    >>> gaps([(0, 4), (6, 8), (3, 5)], 0, 10)
    [(5, 6), (8, 10)]
    """
    lacking, reached = [], start
    for low, high in sorted(ranges):
        if low > reached:
            lacking.append((reached, low))
        reached = max(reached, high)
    return [*lacking, (reached, stop)] if reached < stop else lacking
