"""What a collective costs: ring, tree and hierarchical algorithms, nccl-tests' bandwidths, the bucket that pays.

A tier costs t = alpha + gamma sqrt(bytes) + traffic / bandwidth: nccl-tests curves are missed by 12 to 25 % without
the square root and by 4 to 11 % with it (fits to public curves of H100, B200, MI355X, EFA, TCPXO, InfiniBand).
`traffic` is what each rank sends: bytes times the factor of nccl-tests' PERFORMANCE.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from loadmaster.describe.cluster import Link
from loadmaster.errors import InvalidInput

__all__ = [
    "OPS", "Tier", "algorithm_bandwidth", "best_bucket", "bus_bandwidth", "bus_factor", "collective_seconds",
    "hierarchical_all_reduce", "tree_all_reduce",
]  # fmt: skip

# op -> bytes each rank sends, per byte of the whole tensor, over n ranks
OPS = {
    "all_reduce": lambda n: 2.0 * (n - 1) / n,
    "reduce_scatter": lambda n: 1.0 * (n - 1) / n,
    "all_gather": lambda n: 1.0 * (n - 1) / n,
    "all_to_all": lambda n: 1.0 * (n - 1) / n,
    "broadcast": lambda n: 1.0 + 0.0 * n,
    "send": lambda n: 1.0 + 0.0 * n,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Cost of a tier of the network for one rank.

    Attributes:
        alpha: start-up seconds of a collective; bandwidth: bus bandwidth reached, bytes/s;
        gamma: seconds per sqrt(byte), the slow rise of bandwidth with size.
    """

    alpha: float
    bandwidth: float
    gamma: float = 0.0

    @classmethod
    def of(cls, link: Link) -> Tier:
        """The link at its face value."""
        return cls(alpha=link.latency, bandwidth=link.bandwidth, gamma=link.gamma)


def bus_factor(op: str, n: Any) -> Any:
    """Bytes a rank sends per byte of the tensor (the whole one for all_gather and reduce_scatter).

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8), bus_factor("broadcast", 8)
    (1.75, 0.875, 1.0)
    """
    if op not in OPS:
        raise InvalidInput("collective", op, "is not known", f"use one of {', '.join(OPS)}")
    return OPS[op](n)


def algorithm_bandwidth(num_bytes: float, seconds: float) -> float:
    """Bytes of the tensor a second, as nccl-tests' algbw.

    >>> round(algorithm_bandwidth(1 << 30, 0.004) / 1e9, 2)
    268.44
    """
    return num_bytes / seconds


def bus_bandwidth(op: str, num_bytes: float, n: int, seconds: float) -> float:
    """Bytes a second that each rank sends, as nccl-tests' busbw: a yardstick for point-to-point algorithms.

    Reduction in the switch (NVLink SHARP) sends less and may legitimately exceed the line rate.

    >>> [round(bus_bandwidth(op, 1 << 30, n, 0.004) / 1e9, 2) for op, n in (("all_reduce", 8), ("all_gather", 8))]
    [469.76, 234.88]
    """
    return float(bus_factor(op, n)) * algorithm_bandwidth(num_bytes, seconds)


def collective_seconds(op: str, num_bytes: Any, n: Any, tier: Tier) -> Any:
    """Ring (or pairwise) algorithm over one tier; nothing for a group of one.

    >>> round(float(collective_seconds("all_reduce", 498.6e6, 16, Tier(alpha=0.0, bandwidth=3.125e9))), 3)
    0.299
    """
    seconds = tier.alpha + tier.gamma * np.sqrt(num_bytes) + bus_factor(op, n) * num_bytes / tier.bandwidth
    return np.where(np.asarray(n) > 1, seconds, 0.0)[()]


def tree_all_reduce(num_bytes: Any, n: Any, tier: Tier) -> Any:
    """Double binary tree: the whole tensor up and down once, latency growing with log2 n (Sanders et al. 2009)."""
    depth = np.ceil(np.log2(np.maximum(n, 1)))
    seconds = depth * tier.alpha + tier.gamma * np.sqrt(num_bytes) + 2.0 * num_bytes / tier.bandwidth
    return np.where(np.asarray(n) > 1, seconds, 0.0)[()]


def hierarchical_all_reduce(num_bytes: Any, *, per_node: Any, num_nodes: Any, intra: Tier, inter: Tier) -> Any:
    """Reduce-scatter in the node, all-reduce of a rank's part between nodes, all-gather in the node.

    Args:
        inter: a rank's share of the network between nodes.

    >>> nic = Tier(alpha=0.0, bandwidth=3.125e9 / 8)
    >>> fast = Tier(alpha=0.0, bandwidth=1e15)
    >>> round(float(hierarchical_all_reduce(498.6e6, per_node=8, num_nodes=2, intra=fast, inter=nic)), 2)
    0.16
    """
    inside = 2.0 * collective_seconds("reduce_scatter", num_bytes, per_node, intra)
    return inside + collective_seconds("all_reduce", num_bytes / per_node, num_nodes, inter)


def best_bucket(
    total_bytes: int,
    n: int,
    tier: Tier,
    compute_seconds: float,
    *,
    memory_bytes: int | None = None,
    slowdown: float = 0.1,
) -> tuple[int, float]:
    """The bucket size that costs the step least, and the seconds it costs.

    Gradients appear evenly over `compute_seconds` of backward; buckets are reduced one after another as they fill.
    Small buckets pay alpha each, large ones leave their last reduction exposed; a reduction beside the compute takes
    some of its multiprocessors:

        cost(b) = max(t(b), k t(b) + compute / k - compute) + slowdown (k - 1) t(b),   k = ceil(total / b)

    Args:
        total_bytes: gradients of a rank; n: ranks of the group; memory_bytes: no bucket above this.
        slowdown: share by which a running reduction slows the compute.

    >>> size, cost = best_bucket(1 << 30, 8, Tier(alpha=2e-5, bandwidth=300e9), 0.1)
    >>> size // (1 << 20), cost < 1e-3
    (16, True)
    """
    if n == 1:
        return total_bytes, 0.0
    sizes = [1 << k for k in range(16, 34)]
    sizes = [s for s in sizes if s < total_bytes and (memory_bytes is None or s <= memory_bytes)] or [total_bytes]
    costs = []
    for size in sizes:
        count = -(-total_bytes // size)
        each = float(collective_seconds("all_reduce", size, n, tier))
        exposed = max(each, count * each + compute_seconds / count - compute_seconds)
        costs.append(exposed + slowdown * (count - 1) * each)
    best = min(range(len(sizes)), key=costs.__getitem__)
    return sizes[best], costs[best]
