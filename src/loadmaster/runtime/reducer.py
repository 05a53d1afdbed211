"""The reducer: gradients go straight into flat buckets and are reduced behind the backward as each fills.

A hook on every parameter copies (or adds) its fresh gradient into its place in the bucket and lets the original go,
so gradients exist once. In the last backward before a reduction a full bucket is handed to the communication thread.
Buckets are issued in one sequence on every rank, first the table's, after the first window the one really seen on
rank 0; what a rank did not touch is filled with zeros at the end, so ranks with fewer micro-batches, or with
parameters they did not use, still meet the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from loadmaster.program.buckets import Bucket
from loadmaster.runtime.communication import Communication, Handle
from loadmaster.runtime.ring import Collectives

__all__ = ["BufferPool", "GradientBucket", "Reducer"]

_BITS = 48  # of a word


class BufferPool:
    """Recycles the transient flat buffers of stages 2 and 3, so that a step does not map fresh pages for each.

    On a GPU a buffer comes back when its last work has been launched; whoever takes it next waits for that work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []
        self._events: dict[int, torch.cuda.Event] = {}  # by address of the buffer
        self._lock = threading.Lock()  # the communication thread gives back what the main thread took
        self.live_bytes = 0

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer of undefined content."""
        need = numel * dtype.itemsize
        with self._lock:
            fits = [i for i, b in enumerate(self._free) if need <= b.nbytes <= 2 * need]
            if fits:
                best = self._free.pop(min(fits, key=lambda i: self._free[i].nbytes))
            else:
                self._drop_free()
                best = torch.empty(need, dtype=torch.uint8, device=self._device)
                self.live_bytes += best.nbytes
            event = self._events.pop(best.data_ptr(), None)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        return best[:need].view(dtype)

    def release(self, buffer: Tensor) -> None:
        """Give it back."""
        whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(buffer.untyped_storage())
        with self._lock:
            self._free.append(whole)
            if self._device.type == "cuda":
                self._events[whole.data_ptr()] = torch.cuda.current_stream(self._device).record_event()

    def _drop_free(self) -> None:
        for buffer in self._free:
            self.live_bytes -= buffer.nbytes
        self._free = []


class GradientBucket:
    """One bucket's flat gradient.

    At stages 0 and 1 `buffer` is whole and lasts; at 2 and 3 it is borrowed for a micro-batch, and what lasts is
    `shard`, this rank's chunk.
    """

    def __init__(
        self, table: Bucket, params: Sequence[Tensor], *, dtype: torch.dtype, shard_rank: int, pool: BufferPool | None
    ) -> None:
        self.table, self.params, self.dtype, self._pool = table, params, dtype, pool
        self._rank = shard_rank
        device = params[0].device
        self.filled = [False] * len(params)
        self.used = [False] * len(params)  # in this window
        self.pending = 0
        self.handle: Handle | None = None
        self.buffer: Tensor | None = None
        self.views: list[Tensor] = []
        self.shard: Tensor
        self.fresh = True  # the shard holds nothing of this window yet
        if pool is None:
            self._attach(torch.zeros(table.numel, dtype=dtype, device=device))
            assert self.buffer is not None
            self.shard = self._own(self.buffer)
        else:
            self.shard = torch.zeros(table.chunk, dtype=dtype, device=device)

    def _own(self, buffer: Tensor) -> Tensor:
        return buffer[self._rank * self.table.chunk : (self._rank + 1) * self.table.chunk]

    def _attach(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.views = [
            buffer[e.offset : e.offset + e.numel].view(p.shape)
            for e, p in zip(self.table.entries, self.params, strict=True)
        ]

    def put(self, index: int, gradient: Tensor) -> None:
        """Copy or add one parameter's gradient into its place."""
        if self.buffer is None:
            assert self._pool is not None
            self._attach(self._pool.acquire(self.table.numel, self.dtype))
        view = self.views[index]
        if gradient.is_sparse:
            if not self.filled[index]:
                view.zero_()
            view.add_(gradient.to(view.dtype) if gradient.dtype != view.dtype else gradient)
        elif self.filled[index]:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        self.filled[index] = self.used[index] = True

    def seal(self) -> Tensor:
        """Zero what no gradient reached, and the padding of a borrowed buffer; returns what is to be reduced.

        A borrowed buffer is let go of here: the next micro-batch fills another while this one travels.
        """
        if self.buffer is None:
            assert self._pool is not None
            self._attach(self._pool.acquire(self.table.numel, self.dtype))
        assert self.buffer is not None
        for i, entry in enumerate(self.table.entries):
            if not self.filled[i]:
                self.views[i].zero_()
            if self._pool is not None:
                entries = self.table.entries
                end = entries[i + 1].offset if i + 1 < len(entries) else self.table.numel
                self.buffer[entry.offset + entry.numel : end].zero_()
        self.filled = [False] * len(self.params)
        sealed = self.buffer
        if self._pool is not None:
            self.buffer, self.views = None, []
        return sealed

    def collect(self, buffer: Tensor) -> None:
        """Add the reduced own chunk of a borrowed `buffer` to the shard and give the buffer back."""
        if self._pool is None:
            return
        if self.fresh:
            self.shard.copy_(self._own(buffer))
        else:
            self.shard.add_(self._own(buffer))
        self.fresh = False
        self._pool.release(buffer)


class Reducer:
    """Owns the buckets, the hooks and the sequence of reductions."""

    def __init__(
        self, buckets: Sequence[GradientBucket], communication: Communication | None, *,
        shard: Collectives | None, replicate: Collectives | None, gather_gradients: bool, by_count: bool,
        wire: torch.dtype | None, on_hook: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.buckets = list(buckets)
        self._communication, self._shard, self._replicate = communication, shard, replicate
        self._gather_gradients, self._by_count, self._wire = gather_gradients, by_count, wire
        self._on_hook = on_hook
        self.sequence = list(range(len(self.buckets)))
        self.seen: list[int] = []  # order in which buckets became complete
        self._next = 0
        self._ready: set[int] = set()
        self._issued: set[int] = set()
        self._reduce = self._last = False
        self._running: list[Handle] = []
        self._hooks: list[Any] = []
        for b, bucket in enumerate(self.buckets):
            for i, param in enumerate(bucket.params):
                self._hooks.append(param.register_post_accumulate_grad_hook(self._hook(b, i)))  # type: ignore[no-untyped-call]

    def begin_window(self) -> None:
        """Forget the last window."""
        for bucket in self.buckets:
            bucket.fresh = True
            bucket.handle = None
            bucket.filled = [False] * len(bucket.params)
            bucket.used = [False] * len(bucket.params)

    @property
    def num_unused(self) -> int:
        """Parameters that took no gradient on this rank in this window."""
        return sum(not used for bucket in self.buckets for used in bucket.used)

    def used_words(self) -> list[float]:
        """Which parameters took a gradient here, a bit each, as whole numbers that fp64 holds exactly."""
        bits = [used for bucket in self.buckets for used in bucket.used]
        groups = [bits[i : i + _BITS] for i in range(0, len(bits), _BITS)]
        return [float(sum(1 << k for k, bit in enumerate(group) if bit)) for group in groups]

    def unused_everywhere(self, rows: Sequence[Sequence[float]]) -> set[str]:
        """Names of parameters that no rank's `used_words` has."""
        words = [0] * len(rows[0])
        for row in rows:
            words = [word | int(other) for word, other in zip(words, row, strict=True)]
        names = [entry.name for bucket in self.buckets for entry in bucket.table.entries]
        return {name for i, name in enumerate(names) if not words[i // _BITS] >> (i % _BITS) & 1}

    def begin_backward(self, *, reduce: bool, last: bool) -> None:
        """Prepare for one micro-batch; `reduce` its buckets as they fill, `last` one of the window."""
        self._reduce, self._last = reduce, last
        self._next, self._ready, self._issued, self.seen = 0, set(), set(), []
        for bucket in self.buckets:
            bucket.pending = len(bucket.params)

    def _hook(self, b: int, i: int) -> Callable[[Tensor], None]:
        def hook(param: Tensor) -> None:
            self._on_hook()
            bucket = self.buckets[b]
            assert param.grad is not None
            self._make_room(bucket)
            bucket.put(i, param.grad)
            param.grad = None
            bucket.pending -= 1
            if bucket.pending == 0:
                self.seen.append(b)
                if self._reduce and self._by_count:
                    self._ready.add(b)
                    self._issue_ready()

        return hook

    def _make_room(self, bucket: GradientBucket) -> None:
        """Leave one borrowed buffer under way beside those being filled; none of an earlier micro-batch's."""
        if bucket.buffer is None:
            self._running = [h for h in self._running if not h.done]
            while len(self._running) > (1 if self._issued else 0):
                self._running.pop(0).wait()

    def _issue_ready(self) -> None:
        while self._next < len(self.sequence) and self.sequence[self._next] in self._ready:
            self.issue(self.sequence[self._next])
            self._next += 1

    def issue(self, b: int) -> None:
        """Hand bucket `b` to the communication thread (or finish it at once when alone)."""
        if b in self._issued or not self._reduce:
            return
        self._issued.add(b)
        bucket, last = self.buckets[b], self._last
        buffer = bucket.seal()
        if self._communication is None:
            bucket.collect(buffer)
            return
        bucket.handle = self._communication.submit(self._name(), lambda: self._run(bucket, buffer, last))
        if bucket._pool is not None:
            self._running.append(bucket.handle)

    def _name(self) -> str:
        return f"{'dp_shard' if self._shard is not None else 'dp_replicate'}/reduce"

    def _run(self, bucket: GradientBucket, buffer: Tensor, last: bool) -> None:
        if self._shard is not None:
            self._shard.reduce_scatter(buffer, self._wire)
        bucket.collect(buffer)
        if not last:
            return
        if self._replicate is not None:
            self._replicate.all_reduce(bucket.shard, self._wire)
        if self._gather_gradients and self._shard is not None:
            self._shard.all_gather(buffer)

    def finish_backward(self) -> None:
        """Issue what is left, in sequence: buckets with unused parameters, or all of them on an idle rank."""
        if self._reduce:
            for b in self.sequence:
                self.issue(b)

    def wait(self) -> None:
        """Return when every gradient of the window is reduced."""
        for bucket in self.buckets:
            if bucket.handle is not None:
                bucket.handle.wait()
        self._running = []

    def learn(self, order: Sequence[int]) -> None:
        """Take the agreed order of completion as the sequence from now on."""
        rest = [b for b in range(len(self.buckets)) if b not in order]
        self.sequence = [*order, *rest]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
