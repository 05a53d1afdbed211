"""Times of collectives by size: the ring's hop, and the backend's own operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from loadmaster.probe.fit import Sample, summarise

__all__ = ["OPERATIONS", "time_operation"]

# operation -> share of the whole tensor that each of n ranks sends when it runs as a ring
OPERATIONS: dict[str, Callable[[int], float]] = {
    "hop": lambda n: 1.0,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
}


def time_operation(
    name: str, sizes: tuple[int, ...], device: torch.device, group: dist.ProcessGroup | None, *, repeats: int
) -> Iterator[Sample]:
    """Samples of one operation over `group`, one a size (bytes of the whole tensor); a step takes the slowest rank."""
    ranks = dist.get_world_size(group)
    for size in sizes:
        elements = max(ranks, size // 4 // ranks * ranks)
        run = _operation(name, elements, device, group)
        few = max(5, repeats // 4) if size >= 1 << 22 else repeats
        seconds = torch.zeros(few, dtype=torch.float64)
        for i in range(-2, few):
            dist.barrier(group)
            before = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if i >= 0:
                seconds[i] = time.perf_counter() - before
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
        yield summarise(int(4 * elements * OPERATIONS[name](ranks)), seconds.tolist())


def _operation(name: str, elements: int, device: torch.device, group: dist.ProcessGroup | None) -> Callable[[], None]:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = torch.ones(elements, device=device)
    part = torch.ones(elements // ranks, device=device)
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    after, before = members[(rank + 1) % ranks], members[(rank - 1) % ranks]
    inbox = torch.empty_like(whole)

    def hop() -> None:
        sends = dist.P2POp(dist.isend, whole, after, group), dist.P2POp(dist.irecv, inbox, before, group)
        for work in dist.batch_isend_irecv(list(sends)):
            work.wait()

    match name:
        case "hop":
            return hop
        case "all_reduce":
            return lambda: _done(dist.all_reduce(whole, group=group))
        case "reduce_scatter":
            return lambda: _done(dist.reduce_scatter_single(part, whole, group=group))
        case _:
            return lambda: _done(dist.all_gather_single(whole, part, group=group))


def _done(_work: object) -> None:
    """A synchronous collective has ended when it returns."""
