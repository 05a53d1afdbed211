"""Sharded parameters: flat buffers whose chunks belong to ranks, gathered whole (stages 1, 2) or for a while (3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loadmaster.program.buckets import Bucket
from loadmaster.program.shards import Range, owned_ranges
from loadmaster.runtime.communication import Communication, Handle
from loadmaster.runtime.ring import Collectives

__all__ = ["Gathered", "ParameterBucket"]


@dataclass(slots=True)
class Gathered:
    """Bytes of whole buffers that exist for a while: now, and the most since somebody last set `most` to `live`."""

    live: int = 0
    most: int = 0

    def add(self, num_bytes: int) -> None:
        """Count a buffer that came (or, below zero, went)."""
        self.live += num_bytes
        self.most = max(self.most, self.live)


class ParameterBucket:
    """One bucket's weights in a flat buffer; the module's parameters are views of it.

    With `free_after_use` (stage 3) the buffer's storage exists only while gathered: it is resized to nothing and back,
    so that what autograd saved of it is whole again when backward needs it. Meanwhile each parameter shows one NaN
    element at its full shape.
    """

    def __init__(
        self, table: Bucket, params: Sequence[Tensor], *, rank: int, free_after_use: bool, shard: Collectives | None,
        communication: Communication | None, gathered: Gathered,
    ) -> None:  # fmt: skip
        self.counter = gathered
        self.table, self.params, self.free_after_use = table, list(params), free_after_use
        self._rank, self._shard, self._communication = rank, shard, communication
        self.handle: Handle | None = None
        self.gathered = True
        first = params[0]
        self.full = torch.zeros(table.numel, dtype=first.dtype, device=first.device)
        self._views = [
            self.full[e.offset : e.offset + e.numel].view(p.shape) for e, p in zip(table.entries, params, strict=True)
        ]
        for view, param in zip(self._views, params, strict=True):
            view.copy_(param.detach())
        self._point_at_buffer()
        self._nan = torch.full((1,), float("nan"), dtype=first.dtype, device=first.device)
        self.shard = self._own().clone() if free_after_use else self._own()
        if free_after_use:
            self.counter.add(self.full_bytes)
            self.free()

    def _own(self) -> Tensor:
        return self.full[self._rank * self.table.chunk : (self._rank + 1) * self.table.chunk]

    def _point_at_buffer(self) -> None:
        for view, param in zip(self._views, self.params, strict=True):
            param.data = view

    def ranges(self) -> tuple[Range, ...]:
        """What this rank owns."""
        return owned_ranges(self.table, self._rank)

    def gather(self) -> None:
        """Start filling the whole buffer from its owners; does nothing when it is there or under way."""
        if self.free_after_use:
            if self.gathered:
                return
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
            self.counter.add(self.full_bytes)
            self._own().copy_(self.shard)
        self.gathered = True
        if self._communication is not None and self._shard is not None:
            shard = self._shard
            self.handle = self._communication.submit("dp_shard/all_gather", lambda: shard.all_gather(self.full))

    def wait(self) -> None:
        """Return when the parameters may be read."""
        if self.handle is not None:
            self.handle.wait()
            self.handle = None
        if self.free_after_use:
            self._point_at_buffer()

    def free(self) -> None:
        """Give the whole buffer's memory back (stage 3)."""
        if not self.free_after_use or not self.gathered:
            return
        if self.handle is not None:
            self.handle.wait()
            self.handle = None
        self.gathered = False
        for param in self.params:
            param.data = self._nan.expand(param.shape)
        self.counter.add(-self.full_bytes)
        self.full.untyped_storage().resize_(0)

    @property
    def full_bytes(self) -> int:
        """Bytes of the gathered buffer at this moment."""
        return self.full.untyped_storage().nbytes()
