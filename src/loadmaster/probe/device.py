"""Rates of one device while its neighbours are as busy: matrix products by dtype, and memory traffic."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

__all__ = ["DTYPES", "matmul_rate", "memory_bytes", "memory_rate"]

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def matmul_rate(dtype: str, device: torch.device, *, sizes: tuple[int, ...], seconds: float) -> tuple[float, float]:
    """FLOP/s of square products, the best size's median, and its spread (interquartile range over the median).

    FLOPs = 2 n^3
    """
    best = (0.0, 0.0)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    for n in sizes:
        a, b, out = (torch.randn(n, n, device=device).to(DTYPES[dtype]) for _ in range(3))
        times = _timed(lambda a=a, b=b, out=out: torch.matmul(a, b, out=out), device, seconds=seconds)  # type: ignore[misc]
        best = max(best, (2 * n**3 / times[0], times[1]))
    return best


def memory_rate(device: torch.device, *, size: int, seconds: float) -> tuple[float, float]:
    """Bytes/s read and written by a copy larger than the caches, and the spread."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    median, spread = _timed(lambda: target.copy_(source), device, seconds=seconds)
    return 2 * size / median, spread


def memory_bytes(device: torch.device, ranks_per_host: int) -> int:
    """What a rank may use: the device's memory; of a CPU, the host's over its ranks."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_per_host


def _timed(run: Callable[[], object], device: torch.device, *, seconds: float) -> tuple[float, float]:
    """Median seconds of one run and their spread; all ranks start together."""
    run()
    if dist.is_initialized():
        dist.barrier()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < deadline:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        before = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - before)
        if len(times) >= 5 and sum(times) > 4 * seconds:
            break
    ordered = torch.tensor(times, dtype=torch.float64)
    low, middle, high = (float(ordered.quantile(q)) for q in (0.25, 0.5, 0.75))
    return middle, (high - low) / middle
