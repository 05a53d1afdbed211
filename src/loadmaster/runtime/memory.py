"""Measured memory of one rank: bytes the engine holds, by what they are for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from loadmaster.ledger import Ledger

if TYPE_CHECKING:
    from loadmaster.runtime.assembly import Assembly

__all__ = ["memory_ledger"]


def memory_ledger(parts: Assembly) -> Ledger:
    """Bytes held between steps, by term; storages are counted once and whole, padding included."""
    seen: set[int] = set()
    terms = {"parameters": _bytes(seen, _parameters(parts))}
    gradients = [b.shard if b.buffer is None else b.buffer for b in parts.reducer.buckets]
    terms["gradients"] = _bytes(seen, gradients)
    terms["optimizer/master"] = _bytes(seen, (leaf.tensor for leaf in parts.leaves if leaf.separate))
    for leaf in parts.leaves:
        for kind, value in parts.optimizer.state.get(leaf.tensor, {}).items():
            if isinstance(value, Tensor):
                kind = kind.removesuffix("_buffer")  # PyTorch's SGD says momentum_buffer
                term = "optimizer/scales" if kind.endswith("_scale") else f"optimizer/{kind}"
                terms[term] = terms.get(term, 0) + _bytes(seen, [value])
    terms["optimizer/ema"] = _bytes(seen, (leaf.ema for leaf in parts.leaves if leaf.ema is not None))
    terms["buffers/all_gather"] = sum(w.full_bytes for w in parts.weights if w.free_after_use)
    terms["buffers/buckets"] = parts.pool.live_bytes if parts.pool is not None else 0
    terms["buffers/communication"] = sum(c.scratch_bytes for c in parts.collectives)
    terms["buffers/model"] = _bytes(seen, parts.module.buffers())
    return Ledger("bytes", {k: v for k, v in terms.items() if v})


def _parameters(parts: Assembly) -> Iterable[Tensor]:
    if parts.stage == 3:
        return [w.shard for w in parts.weights]
    return list(parts.module.parameters())


def _bytes(seen: set[int], tensors: Iterable[Tensor]) -> int:
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen and storage.nbytes():
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
