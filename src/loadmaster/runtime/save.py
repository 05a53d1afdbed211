"""Writing a checkpoint: every rank its part at once, whole or not at all, in the background when asked.

Everything goes into a hidden folder, is flushed to the disk, and gets its name by one rename; then ``latest`` is
replaced by one rename. Whatever moment the machine stops at, the previous checkpoint stands as it was.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from loadmaster.errors import InvalidInput, LoadmasterError
from loadmaster.runtime.checkpoint import FORMAT, VERSION, Shard, checksum, gaps, seal
from loadmaster.runtime.whole import MANIFEST, list_checkpoints

__all__ = ["Saver"]

WAIT_SECONDS = 1800.0
POLL_SECONDS = 0.02
Range = tuple[str, str, int, int]  # kind, name, start, stop


@dataclass(frozen=True, slots=True)
class _Job:
    """What one rank writes of one checkpoint."""

    step: int
    folder: Path
    tensors: Mapping[Range, Tensor]
    shapes: Mapping[tuple[str, str], tuple[int, ...]]
    run: Mapping[str, Any]


class Saver:
    """Saves into `folder`, keeps the newest `keep`.

    Args:
        folder: the run's checkpoint folder.
        keep: whole checkpoints that stay.
        asynchronous: copy the state and write it while training goes on; an error surfaces at the next save.
    """

    def __init__(self, folder: Path, *, keep: int = 2, asynchronous: bool = False) -> None:
        self.folder, self.keep, self.asynchronous = folder, max(1, keep), asynchronous
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        if self.rank == 0:
            _make(folder)
            for left in (*folder.glob(".saving-*"), *folder.glob(".gone-*")):
                shutil.rmtree(left, ignore_errors=True)

    def save(self, step: int, shards: Iterable[Shard], run: Mapping[str, Any]) -> None:
        """Save the state after `step` steps; every rank calls it. Returns when written (or copied, asynchronous)."""
        self.finish()
        held = {(s.kind, s.name, s.start, s.stop): s for s in shards if s.stop > s.start}
        mine = _divide([(key, _num_bytes(s)) for key, s in held.items()], self.rank, self.world_size)
        tensors = {key: _flat(held[key].tensor, copy=self.asynchronous) for key in mine}
        shapes = {(s.kind, s.name): tuple(s.full_shape) for s in held.values()}
        folder = self.folder / self._agree(f".saving-step-{step:08d}-{secrets.token_hex(4)}")
        job = _Job(step, folder, tensors, shapes, run)
        if not self.asynchronous:
            self._write(job)
            self._agree("")
            return
        self.thread = threading.Thread(target=self._guarded, args=(job,), name="checkpoint", daemon=False)
        self.thread.start()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written; raise what went wrong with it."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def _agree(self, value: str) -> str:
        """Rank 0's value, on every rank."""
        box: list[Any] = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0)
        return str(box[0])

    def _guarded(self, job: _Job) -> None:
        try:
            self._write(job)
        except BaseException as error:
            self.error = error

    def _write(self, job: _Job) -> None:
        """This rank's file, then its table; rank 0 waits for all tables and names the whole."""
        try:
            job.folder.mkdir(parents=True, exist_ok=True)
            name = f"rank-{self.rank:05d}"
            save_file({_key(r): t for r, t in job.tensors.items()}, str(job.folder / f"{name}.safetensors"))
            _flush(job.folder / f"{name}.safetensors")
            rows = [[*r, checksum(t)] for r, t in job.tensors.items()]
            shapes = [[*at, list(shape)] for at, shape in job.shapes.items()]
            _put(job.folder / f"{name}.json", {"rows": rows, "shapes": shapes})
            if self.rank == 0:
                self._commit(job, _await(job.folder, self.world_size))
        except OSError as error:
            raise InvalidInput(
                "checkpoint", str(error.filename or self.folder), f"cannot be written ({error.strerror})",
                "free space there or choose another --out; the previous checkpoint is whole",
            ) from error  # fmt: skip

    def _commit(self, job: _Job, tables: Sequence[Mapping[str, Any]]) -> None:
        body = {
            "format": FORMAT, "version": VERSION, "step": job.step, "run": dict(job.run), "tensors": _merge(tables),
        }  # fmt: skip
        _put(job.folder / MANIFEST, {**body, "seal": seal(body)})
        for path in job.folder.glob("rank-*.json"):
            path.unlink()
        _flush(job.folder)
        final = _free_name(self.folder / f"step-{job.step:08d}")
        job.folder.rename(final)
        _flush(self.folder)
        pointer = self.folder / ".latest"
        pointer.write_text(final.name + "\n", encoding="utf-8")
        _flush(pointer)
        pointer.replace(self.folder / "latest")
        _flush(self.folder)
        self._prune(final)

    def _prune(self, newest: Path) -> None:
        """Remove all but the newest `keep`; one leaves by a rename first, so that half a folder bears no name."""
        others = [path for path in list_checkpoints(self.folder) if path != newest]
        for path in others[: max(0, len(others) + 1 - self.keep)]:
            gone = path.with_name(f".gone-{path.name}-{secrets.token_hex(2)}")
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def _divide(held: Sequence[tuple[Range, int]], rank: int, world_size: int) -> list[Range]:
    """Which of the ranges held here this rank writes: one that several hold goes to the least loaded of them."""
    if world_size == 1:
        return [key for key, _ in held]
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, list(held))
    holders: dict[Range, list[int]] = {}
    sizes: dict[Range, int] = {}
    for who, ranges in enumerate(everyone):
        for key, size in ranges:
            holders.setdefault(tuple(key), []).append(who)
            sizes[tuple(key)] = size
    load = [0] * world_size
    mine = []
    for key, ranks in sorted(holders.items(), key=lambda item: (len(item[1]), -sizes[item[0]], item[0])):
        writer = min(ranks, key=lambda r: (load[r], r))
        load[writer] += sizes[key]
        if writer == rank:
            mine.append(key)
    return mine


def _merge(tables: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry a tensor with its ranges in order; every element must be there.

    Raises:
        LoadmasterError: the ranks together do not hold a tensor whole (the engine's state is wrong).
    """
    shapes = {(kind, name): shape for table in tables for kind, name, shape in table["shapes"]}
    parts: dict[tuple[str, str], list[dict[str, Any]]] = {at: [] for at in shapes}
    for rank, table in enumerate(tables):
        for kind, name, start, stop, digest in table["rows"]:
            key = _key((kind, name, start, stop))
            file = f"rank-{rank:05d}.safetensors"
            parts[kind, name].append({"start": start, "stop": stop, "file": file, "key": key, "checksum": digest})
    for at, rows in parts.items():
        rows.sort(key=lambda row: row["start"])
        if lacking := gaps([(r["start"], r["stop"]) for r in rows], 0, math.prod(shapes[at])):
            raise LoadmasterError(f"checkpoint: {at[0]} of {at[1]}: no rank holds elements {lacking}; not saved")
    return [{"kind": k, "name": n, "shape": shapes[k, n], "parts": rows} for (k, n), rows in parts.items()]


def _await(folder: Path, world_size: int) -> list[dict[str, Any]]:
    """Tables of all ranks, as their files appear."""
    deadline = time.monotonic() + WAIT_SECONDS
    names = [folder / f"rank-{rank:05d}.json" for rank in range(world_size)]
    while missing := [path.name for path in names if not path.is_file()]:
        if time.monotonic() > deadline:
            raise LoadmasterError(f"checkpoint: {', '.join(missing)} did not appear in {folder}; do all hosts see it?")
        time.sleep(POLL_SECONDS)
    return [json.loads(path.read_text(encoding="utf-8")) for path in names]


def _key(key: Range) -> str:
    kind, name, start, _ = key
    return f"{kind}/{name}@{start}"


def _num_bytes(shard: Shard) -> int:
    return shard.tensor.numel() * shard.tensor.element_size()


def _flat(tensor: Tensor, *, copy: bool) -> Tensor:
    flat = tensor.detach().reshape(-1).to("cpu")
    shares = flat.data_ptr() == tensor.data_ptr()
    partial = flat.untyped_storage().nbytes() != flat.numel() * flat.element_size()
    return torch.clone(flat) if shares and (copy or partial) else flat


def _free_name(path: Path) -> Path:
    """`path`, or with a number behind it where a checkpoint of that step stands already."""
    taken, number = path, 0
    while taken.exists():
        number += 1
        taken = path.with_name(f"{path.name}.{number}")
    return taken


def _put(path: Path, body: Mapping[str, Any]) -> None:
    """Write JSON so that the name appears with the whole content."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(body), encoding="utf-8")
    _flush(part)
    part.rename(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(
            "out", str(folder), f"cannot be written ({error.strerror})", "choose another --out"
        ) from None
