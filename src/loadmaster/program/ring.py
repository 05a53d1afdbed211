"""The ring table: who sends which chunk to whom, step by step, for reduce-scatter and all-gather.

Two orders of the same transfers. `RING` passes partial sums to the next neighbour (Patarasuk and Yuan 2009, Journal
of Parallel and Distributed Computing 69, section 3.1): a rank talks to two neighbours and keeps one chunk of scratch.
`DIRECT` sends each chunk straight to its owner, which adds the parts in rank order: as many bytes and messages, no
waiting for neighbours, and a sum whose order, and so whose every bit, does not depend on how the buffer was cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "Algorithm",
    "Transfer",
    "all_gather_table",
    "pieces",
    "reduce_scatter_table",
    "replay_all_gather",
    "replay_sum",
]


PIECE_BYTES = 8 << 20


class Algorithm(StrEnum):
    """How a collective moves its bytes."""

    RING = "ring"
    DIRECT = "direct"
    BACKEND = "backend"  # the process group's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What one rank does in one step: send a chunk to a peer and take another from a peer."""

    step: int
    send_to: int
    send_chunk: int
    recv_from: int
    recv_chunk: int


def reduce_scatter_table(num_ranks: int, rank: int, algorithm: Algorithm = Algorithm.RING) -> tuple[Transfer, ...]:
    """num_ranks - 1 transfers after which `rank` owns the sum of chunk `rank`.

    >>> [(t.send_to, t.send_chunk, t.recv_from, t.recv_chunk) for t in reduce_scatter_table(3, 0)]
    [(1, 2, 2, 1), (1, 1, 2, 0)]
    """
    n, r = num_ranks, rank
    if algorithm is Algorithm.RING:
        return tuple(
            Transfer(step=s, send_to=(r + 1) % n, send_chunk=(r - s - 1) % n,
                     recv_from=(r - 1) % n, recv_chunk=(r - s - 2) % n)
            for s in range(n - 1)
        )  # fmt: skip
    return tuple(
        Transfer(step=s, send_to=(r + s + 1) % n, send_chunk=(r + s + 1) % n, recv_from=(r - s - 1) % n, recv_chunk=r)
        for s in range(n - 1)
    )


def all_gather_table(num_ranks: int, rank: int, algorithm: Algorithm = Algorithm.RING) -> tuple[Transfer, ...]:
    """num_ranks - 1 transfers after which `rank`, which began with chunk `rank`, holds every chunk.

    >>> [(t.send_chunk, t.recv_chunk) for t in all_gather_table(3, 0)]
    [(0, 2), (2, 1)]
    """
    n, r = num_ranks, rank
    if algorithm is Algorithm.RING:
        return tuple(
            Transfer(step=s, send_to=(r + 1) % n, send_chunk=(r - s) % n,
                     recv_from=(r - 1) % n, recv_chunk=(r - s - 1) % n)
            for s in range(n - 1)
        )  # fmt: skip
    return tuple(
        Transfer(step=s, send_to=(r + s + 1) % n, send_chunk=r, recv_from=(r - s - 1) % n, recv_chunk=(r - s - 1) % n)
        for s in range(n - 1)
    )


def pieces(chunk: int, num_ranks: int, piece_bytes: int, element_bytes: int) -> list[tuple[int, int]]:
    """How a chunk is cut to be summed: a piece from all ranks is at most `piece_bytes`, and `PIECE_BYTES`.

    Small pieces are still in cache when they are added, and keep the receive buffers small.

    >>> pieces(1000, 2, 4096, 4)
    [(0, 512), (512, 1000)]
    """
    step = piece_elements(num_ranks, piece_bytes, element_bytes)
    return [(low, min(low + step, chunk)) for low in range(0, chunk, step)]


def piece_elements(num_ranks: int, piece_bytes: int, element_bytes: int) -> int:
    """Elements of a whole piece; a chunk is cut into ``ceil(chunk / piece_elements)`` of them.

    >>> piece_elements(2, 4096, 4), len(pieces(1000, 2, 4096, 4))
    (512, 2)
    """
    return max(min(piece_bytes, PIECE_BYTES) // num_ranks // element_bytes, 1)


def replay_sum(num_ranks: int, algorithm: Algorithm) -> list[frozenset[int]]:
    """Play every rank's reduce-scatter and return whose parts each owner summed: all ranks, each once.

    >>> [sorted(s) for s in replay_sum(3, Algorithm.RING)]
    [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    """
    tables = [reduce_scatter_table(num_ranks, r, algorithm) for r in range(num_ranks)]
    held = [{c: frozenset({r}) for c in range(num_ranks)} for r in range(num_ranks)]
    for step in range(num_ranks - 1):
        sent = [held[r][tables[r][step].send_chunk] for r in range(num_ranks)]
        for r in range(num_ranks):
            move = tables[r][step]
            peer = tables[move.recv_from][step]
            assert (peer.send_to, peer.send_chunk) == (r, move.recv_chunk), "a send meets no receive"
            part = sent[move.recv_from]
            assert not held[r][move.recv_chunk] & part, "a part is summed twice"
            held[r][move.recv_chunk] |= part
    return [held[r][r] for r in range(num_ranks)]


def replay_all_gather(num_ranks: int, algorithm: Algorithm) -> list[frozenset[int]]:
    """Play every rank's all-gather and return the chunks each rank ends with.

    >>> [sorted(s) for s in replay_all_gather(2, Algorithm.DIRECT)]
    [[0, 1], [0, 1]]
    """
    tables = [all_gather_table(num_ranks, r, algorithm) for r in range(num_ranks)]
    held = [{r} for r in range(num_ranks)]
    for step in range(num_ranks - 1):
        for r in range(num_ranks):
            assert tables[r][step].send_chunk in held[r], "a rank sends what it does not hold"
        for r in range(num_ranks):
            move = tables[r][step]
            peer = tables[move.recv_from][step]
            assert (peer.send_to, peer.send_chunk) == (r, move.recv_chunk), "a send meets no receive"
            held[r].add(move.recv_chunk)
    return [frozenset(chunks) for chunks in held]
