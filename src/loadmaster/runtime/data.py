"""Packed sequences in one global order that depends on the seed alone, dealt to the data ranks step by step.

A step reads the next G positions of the order, G the global batch. World size and micro-batch size only
decide who reads which of them: a run resumed on other ranks goes on with the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loadmaster.errors import InvalidInput
from loadmaster.runtime.documents import find_documents
from loadmaster.runtime.tokens import TokenFile, load_tokenizer, prepare_tokens

__all__ = ["Sequences", "open_sequences", "shuffled"]

U64 = np.uint64


def _mix(x: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """A 64-bit mix (multiply and shift) of `x` with `key`."""
    x = (x + U64(key)) * U64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> U64(32))) * U64(0xD6E8FEB86659FD93)
    return x ^ (x >> U64(32))


def shuffled(index: npt.NDArray[np.int64], size: int, seed: int, *, rounds: int = 4) -> npt.NDArray[np.int64]:
    """Where a seeded permutation of ``range(size)`` sends `index`, without holding the permutation.

    A Feistel network over the smallest even number of bits that holds `size` is a bijection; an image outside the
    range is sent on until it falls inside (cycle walking), which keeps it one.

    Source: M. Luby, C. Rackoff, "How to construct pseudorandom permutations from pseudorandom functions",
    SIAM J. Comput. 17 (1988); J. Black, P. Rogaway, "Ciphers with arbitrary finite domains" (2002), method 2.

    >>> sorted(shuffled(np.arange(1000), 1000, seed=7).tolist()) == list(range(1000))
    True
    """
    half = U64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = (U64(1) << half) - U64(1)
    keys = [int(k) for k in np.random.SeedSequence(seed).generate_state(rounds, dtype=np.uint32)]
    out = index.astype(np.uint64)
    outside = np.ones(len(out), dtype=bool)
    while outside.any():
        left, right = out[outside] >> half, out[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right, key) & mask)
        out[outside] = (left << half) | right
        outside = out >= U64(size)
    return out.astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Sequences of `seq_len` tokens cut from the token file end to end, in shuffled order, epoch after epoch.

    Attributes:
        tokens: the flat file.
        first, count: the part of its sequences that is read (training, or what is held out).
    """

    tokens: TokenFile
    seq_len: int
    seed: int
    first: int
    count: int

    def at(self, positions: npt.NDArray[np.int64]) -> Tensor:
        """Ids (int64) of shape (len(positions), seq_len) at these positions of the global order."""
        index = np.empty_like(positions)
        for epoch in np.unique(positions // self.count):
            here = positions // self.count == epoch
            seed = self.seed * 1_000_003 + int(epoch)
            index[here] = self.first + shuffled(positions[here] % self.count, self.count, seed)
        starts = index[:, None] * self.seq_len + np.arange(self.seq_len)
        return torch.from_numpy(self.tokens.ids[starts].astype(np.int64))

    def window(
        self, position: int, *, global_batch_size: int, data_rank: int, dp: int, micro_batch_size: int
    ) -> list[dict[str, Tensor]]:
        """Micro-batches of one data rank for the global batch at `position`: its even share of it, in order."""
        low, high = (global_batch_size * r // dp for r in (data_rank, data_rank + 1))
        ids = self.at(position + np.arange(low, high))
        return [{"input_ids": part, "labels": part.clone()} for part in torch.split(ids, micro_batch_size)]


def open_sequences(
    source: str, tokenizer: str, folder: Path, *, seq_len: int, vocab_size: int, seed: int,
    text_field: str = "text", held_out: float = 0.0,
) -> tuple[Sequences, Sequences | None]:  # fmt: skip
    """Training sequences of `source`, and the last share `held_out` of them kept apart for evaluation.

    Raises:
        InvalidInput: no text, too little of it, or a tokenizer that does not fit the model.
    """
    documents = find_documents(source, text_field=text_field)
    tokens = prepare_tokens(documents, load_tokenizer(tokenizer), folder, vocab_size=vocab_size)
    total = len(tokens) // seq_len
    kept = round(total * held_out) if held_out else 0
    if total - kept < 1:
        raise InvalidInput(
            "data", source, f"holds {len(tokens)} tokens, less than one sequence of {seq_len}",
            "give more text, or plan with a shorter --seq",
        )  # fmt: skip
    common: dict[str, Any] = {"tokens": tokens, "seq_len": seq_len, "seed": seed}
    train = Sequences(first=0, count=total - kept, **common)
    return train, Sequences(first=total - kept, count=kept, **common) if kept else None
