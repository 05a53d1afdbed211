"""Collectives over one axis: ours, played from the ring table over send and receive, and the backend's own.

All work in place on a flat buffer of `size` equal chunks. They block, and are called from the communication thread.
Parts are added in fp32 (or the buffer's dtype if wider) even where 16-bit numbers travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from loadmaster.program.ring import Algorithm, Transfer, all_gather_table, pieces, reduce_scatter_table
from loadmaster.runtime.mesh import Axis
from loadmaster.runtime.traffic import TrafficMeter

__all__ = ["BackendCollectives", "Collectives", "PointToPoint", "collectives_for"]


# the newer names where torch has them
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Collectives(Protocol):
    """What the engine asks of an axis; `scratch_bytes` is what it keeps for receiving."""

    axis: Axis

    def reduce_scatter(self, buffer: Tensor, wire: torch.dtype | None = None) -> None:
        """Leave the sum over ranks in this rank's own chunk of `buffer`; other chunks are then undefined."""

    def all_gather(self, buffer: Tensor, term: str = "all_gather") -> None:
        """Fill every chunk of `buffer` from the rank that owns it."""

    def all_reduce(self, buffer: Tensor, wire: torch.dtype | None = None) -> None:
        """Leave the sum over ranks everywhere in `buffer`, whose length is a multiple of the axis."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes kept for receiving."""


def collectives_for(axis: Axis, algorithm: Algorithm, meter: TrafficMeter, *, piece_bytes: int) -> Collectives:
    """The collectives of `axis` by `algorithm`."""
    if algorithm is Algorithm.BACKEND:
        return BackendCollectives(axis, meter)
    return PointToPoint(axis, algorithm, meter, piece_bytes=piece_bytes)


class PointToPoint:
    """Ours. A chunk travels in pieces of at most piece_bytes / size, which bounds the receive buffers."""

    def __init__(self, axis: Axis, algorithm: Algorithm, meter: TrafficMeter, *, piece_bytes: int) -> None:
        self.axis, self.algorithm, self._meter = axis, algorithm, meter
        self._piece_bytes = piece_bytes
        self._reduce = reduce_scatter_table(axis.size, axis.rank, algorithm)
        self._gather = all_gather_table(axis.size, axis.rank, algorithm)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    @property
    def scratch_bytes(self) -> int:
        """Bytes kept for receiving."""
        return self._scratch.nbytes

    def reduce_scatter(self, buffer: Tensor, wire: torch.dtype | None = None) -> None:
        """See `Collectives`."""
        self._scatter(buffer, wire, "reduce_scatter")

    def _scatter(self, buffer: Tensor, wire: torch.dtype | None, term: str) -> None:
        chunk = buffer.numel() // self.axis.size
        wire = wire or buffer.dtype
        cuts = self._pieces(chunk, max(wire.itemsize, buffer.element_size()))
        if self.algorithm is Algorithm.DIRECT:
            self._direct_sums(buffer, chunk, cuts, wire, term)
            return
        for low, high in cuts:
            self._ring_sum(buffer, chunk, low, high, wire, term)

    def all_gather(self, buffer: Tensor, term: str = "all_gather") -> None:
        """See `Collectives`."""
        chunk = buffer.numel() // self.axis.size
        parts = buffer.view(self.axis.size, chunk)
        if self.algorithm is Algorithm.RING:
            for move in self._gather:
                self._exchange([move], [parts[move.send_chunk]], [parts[move.recv_chunk]], term)
        else:
            sends = [parts[move.send_chunk] for move in self._gather]
            self._exchange(self._gather, sends, [parts[move.recv_chunk] for move in self._gather], term)

    def all_reduce(self, buffer: Tensor, wire: torch.dtype | None = None) -> None:
        """Reduce-scatter, then all-gather."""
        self._scatter(buffer, wire, "all_reduce")
        self.all_gather(buffer, "all_reduce")

    def _pieces(self, chunk: int, element_bytes: int) -> list[tuple[int, int]]:
        return pieces(chunk, self.axis.size, self._piece_bytes, element_bytes)

    def _ring_sum(self, buffer: Tensor, chunk: int, low: int, high: int, wire: torch.dtype, term: str) -> None:
        (received,) = self._receive_buffers(1, high - low, wire, buffer.device)
        for move in self._reduce:
            out = buffer[move.send_chunk * chunk + low : move.send_chunk * chunk + high]
            self._exchange([move], [out.to(wire)], [received], term)
            mine = buffer[move.recv_chunk * chunk + low : move.recv_chunk * chunk + high]
            add_into(mine, received)

    def _direct_sums(
        self, buffer: Tensor, chunk: int, cuts: list[tuple[int, int]], wire: torch.dtype, term: str
    ) -> None:
        """Piece by piece; the next piece travels while this one is added."""
        longest = max(high - low for low, high in cuts)
        halves = self._receive_buffers(2 * len(self._reduce), longest, wire, buffer.device)
        sides = [halves[: len(self._reduce)], halves[len(self._reduce) :]]
        ahead = self._start_piece(buffer, chunk, cuts[0], sides[0], wire, term, 0)
        for i, (low, high) in enumerate(cuts):
            works, received = ahead
            if i + 1 < len(cuts):
                ahead = self._start_piece(buffer, chunk, cuts[i + 1], sides[(i + 1) % 2], wire, term, (i + 1) % 2)
            for work in works:
                work.wait()
            mine = buffer[self.axis.rank * chunk + low : self.axis.rank * chunk + high]
            parts = {move.recv_from: part for move, part in zip(self._reduce, received, strict=True)}
            sum_in_rank_order(mine, self.axis.rank, parts)

    def _start_piece(
        self,
        buffer: Tensor,
        chunk: int,
        cut: tuple[int, int],
        into: list[Tensor],
        wire: torch.dtype,
        term: str,
        tag: int,
    ) -> tuple[list[Any], list[Tensor]]:
        low, high = cut
        received = [part[: high - low] for part in into]
        outs = [buffer[m.send_chunk * chunk + low : m.send_chunk * chunk + high].to(wire) for m in self._reduce]
        return self._start(self._reduce, outs, received, term, tag), received

    def _receive_buffers(self, count: int, numel: int, wire: torch.dtype, device: torch.device) -> list[Tensor]:
        need = count * numel * wire.itemsize
        if self._scratch.nbytes < need:
            self._scratch = torch.empty(need, dtype=torch.uint8, device=device)
        return list(self._scratch[:need].view(wire).view(count, numel))

    def _exchange(self, moves: Sequence[Transfer], sends: list[Tensor], recvs: list[Tensor], term: str) -> None:
        for work in self._start(moves, sends, recvs, term):
            work.wait()

    def _start(
        self, moves: Sequence[Transfer], sends: list[Tensor], recvs: list[Tensor], term: str, tag: int = 0
    ) -> list[Any]:
        group = self.axis.group
        works: list[Any] = []
        for move, part in zip(moves, recvs, strict=True):
            works.append(dist.irecv(part, group=group, group_src=move.recv_from, tag=tag))
        for move, part in zip(moves, sends, strict=True):
            works.append(dist.isend(part, group=group, group_dst=move.send_to, tag=tag))
        self._meter.count(f"{self.axis.name}/{term}", num_bytes=sum(part.nbytes for part in sends), messages=len(sends))
        return works


class BackendCollectives:
    """The process group's own collectives; NCCL's on GPUs.

    Bytes are counted by the algorithm the backend is known to use: Gloo's reduce_scatter is an all-reduce.
    """

    def __init__(self, axis: Axis, meter: TrafficMeter) -> None:
        self.axis, self._meter = axis, meter
        self._gloo = dist.get_backend(axis.group) == "gloo"

    @property
    def scratch_bytes(self) -> int:
        """The backend's buffers are its own."""
        return 0

    def reduce_scatter(self, buffer: Tensor, wire: torch.dtype | None = None) -> None:
        """See `Collectives`."""
        source = buffer.to(wire) if wire not in (None, buffer.dtype) else buffer
        mine = self._chunk(source)
        out = torch.empty_like(mine) if self._gloo else mine
        _reduce_scatter(out, source, group=self.axis.group)
        if out.data_ptr() != self._chunk(buffer).data_ptr():
            self._chunk(buffer).copy_(out)
        self._count("reduce_scatter", source.nbytes, trips=2 if self._gloo else 1)

    def all_gather(self, buffer: Tensor, term: str = "all_gather") -> None:
        """See `Collectives`."""
        mine = self._chunk(buffer)
        _all_gather(buffer, mine.clone() if self._gloo else mine, group=self.axis.group)
        self._count(term, buffer.nbytes, trips=1)

    def all_reduce(self, buffer: Tensor, wire: torch.dtype | None = None) -> None:
        """See `Collectives`."""
        source = buffer.to(wire) if wire not in (None, buffer.dtype) else buffer
        dist.all_reduce(source, group=self.axis.group)
        if source is not buffer:
            buffer.copy_(source)
        self._count("all_reduce", source.nbytes, trips=2)

    def _chunk(self, buffer: Tensor) -> Tensor:
        chunk = buffer.numel() // self.axis.size
        return buffer[self.axis.rank * chunk : (self.axis.rank + 1) * chunk]

    def _count(self, term: str, num_bytes: int, *, trips: int) -> None:
        n = self.axis.size
        self._meter.count(
            f"{self.axis.name}/{term}", num_bytes=trips * (n - 1) * num_bytes // n, messages=trips * (n - 1)
        )


def add_into(mine: Tensor, part: Tensor) -> None:
    """mine += part, added in fp32 where both are 16-bit."""
    if mine.dtype == part.dtype and mine.element_size() < 4:
        mine.copy_(mine.float().add_(part))
    else:
        mine.add_(part)


def sum_in_rank_order(mine: Tensor, rank: int, parts: dict[int, Tensor]) -> None:
    """mine = parts[0] + parts[1] + ... with `mine` at its own place, from the left; parts may be overwritten."""
    below = [parts[r] for r in sorted(parts) if r < rank]
    above = [parts[r] for r in sorted(parts) if r > rank]
    if mine.element_size() < 4 or any(p.element_size() < 4 for p in parts.values()):
        total = torch.zeros_like(mine, dtype=torch.float32)
        for part in (*below, mine, *above):
            total.add_(part)
        mine.copy_(total)
        return
    if below:
        for part in below[1:]:
            below[0].add_(part)
        mine.add_(below[0])
    for part in above:
        mine.add_(part)
