"""Seconds of what crosses ranks once a micro-batch or once a step: pipeline sends, gradients, gathers, the update."""

from __future__ import annotations

from typing import Any

import numpy as np

from loadmaster.describe.precision import BYTES
from loadmaster.describe.workload import Workload
from loadmaster.laws.coefficients import ModelCoefficients
from loadmaster.laws.layer import Machine

__all__ = ["gradient_seconds", "ring_bandwidth", "send_seconds", "stage_params"]

Array = Any


def send_seconds(machine: Machine, workload: Workload, width: int, full: Any) -> Array:
    """Seconds a micro-batch spends between two stages, forward and backward.

    The stream is sent in tp slices, each over its rank's own link, and put together again over the node's links.
    """
    c, cluster = machine.constants, machine.cluster
    num_bytes = machine.element * width * full.micro_batch_size * workload.seq_len / full.cp
    world = full.tp * full.cp * full.pp * full.dp_replicate * full.dp_shard
    fast = c.bus_efficiency * cluster.intra_node.bandwidth
    near = world <= cluster.fast_domain
    link = np.where(near, fast, c.nic_efficiency * cluster.inter_node.bandwidth)
    alpha = np.where(near, cluster.intra_node.latency, cluster.inter_node.latency)
    again = np.where(full.sequence_parallel, 0.0, (full.tp - 1) / full.tp * num_bytes / fast)
    return c.send_exposed * 2.0 * (alpha + num_bytes / full.tp / link + again)


def ring_bandwidth(machine: Machine, members: Array, stride: Array) -> Array:
    """Bytes a second that each rank of a data ring sends, with `members` ranks `stride` devices apart.

    Inside the domain of the fast links their bus bandwidth; across nodes the share of the NICs that belongs to the
    ring's g members in a node, less what several members in one node lose (ring_share).
    """
    c, cluster = machine.constants, machine.cluster
    domain = cluster.fast_domain
    inside = np.maximum(1, np.minimum(members, domain // np.minimum(stride, domain)))
    share = np.where(inside >= domain, c.ring_share_node, np.where(inside > 1, c.ring_share, 1.0))
    near = c.bus_efficiency * cluster.intra_node.bandwidth
    far = np.minimum(near, c.nic_efficiency * cluster.inter_node.bandwidth * inside * share)
    return np.where(members * stride <= domain, near, far)


def stage_params(numbers: ModelCoefficients, full: Any, first: Array, last: Array) -> tuple[Array, Array]:
    """Dense and expert parameters of the fullest rank."""
    layers = numbers.num_layers
    dense_layer = sum(n * (b.split_params / full.tp + b.whole_params) for b, n in numbers.blocks) / layers
    experts = ((n * b.expert_params, n * b.expert_split_params) for b, n in numbers.blocks)
    expert_layer = sum(whole + split / full.tp for whole, split in experts) / layers / full.ep
    embedding = (numbers.embedding.split_params + numbers.embedding.whole_params) / full.tp
    head = (numbers.head.split_params + numbers.head.whole_params) / full.tp
    tied = np.where(full.pp > 1, numbers.tied_params / full.tp, 0.0)
    at_first = first * dense_layer + embedding + np.where(full.pp > 1, 0.0, head)
    at_last = last * dense_layer + head + tied
    return np.maximum(at_first, np.where(full.pp > 1, at_last, 0.0)), np.maximum(first, last) * expert_layer


def gradient_seconds(
    numbers: ModelCoefficients, machine: Machine, full: Any, first: Array, last: Array, m: Array, *, whole_step: Any,
    trained: float = 1.0,
) -> dict[str, Array]:  # fmt: skip
    """Terms of the data axes and the update: accumulation, gathers and scatters, replicas, optimizer.

    Args:
        m: micro-batches; whole_step: compute they hide beside; trained: share of the weights that has gradients.
    """
    c, precision, cluster = machine.constants, machine.precision, machine.cluster
    held, held_expert = stage_params(numbers, full, first, last)
    dense, expert = trained * held, trained * held_expert
    shards, replicas = full.dp_shard * full.cp, full.dp_replicate
    stride = full.tp
    ring = ring_bandwidth(machine, shards, stride)
    expert_ring = ring_bandwidth(machine, np.maximum(shards // full.ep, 1), stride * full.ep)
    grad, weight = BYTES[precision.reduce], BYTES[precision.compute]

    def once(num_bytes: Array, expert_bytes: Array) -> Array:
        """One reduce-scatter or all-gather over the shards."""
        return (shards - 1) / shards * num_bytes / ring + np.where(
            shards > full.ep, (1.0 - full.ep / shards) * expert_bytes / expert_ring, 0.0
        )

    scatter, updated = once(dense * grad, expert * grad), once(dense * weight, expert * weight)
    gather = once(held * weight, held_expert * weight)
    replica_ring = ring_bandwidth(machine, replicas, stride * shards)
    part = (dense + expert) / np.where(full.zero > 0, shards, 1) * grad
    replica = np.where(replicas > 1, 2.0 * (replicas - 1) / replicas * part / replica_ring, 0.0)
    each, last_replica = _buckets(machine, full, part, replica, replicas * stride * shards)
    replica = np.where(replicas > 1, replica + each, 0.0)
    # ZeRO-3 gathers for the forward and again for the backward and scatters, every micro-batch, beside the compute
    hidden = c.gather_overlap
    whole_window = machine.stack.retains_unsharded & ~np.asarray(full.reduce_each_micro_batch, dtype=bool)
    scatter_each = np.where(whole_window, scatter / m, scatter)
    sharded = m * (
        np.maximum(gather - hidden * whole_step.forward, 0.0)
        + np.maximum(gather + scatter_each - hidden * whole_step.backward, 0.0)
        + c.gather_tax * np.minimum(2.0 * gather + scatter_each, whole_step.forward + whole_step.backward)
    )
    often = np.where((full.zero == 2) & full.reduce_each_micro_batch, m, 1.0)
    plain = np.where(full.zero > 0, often * scatter + updated, 2.0 * scatter)
    beside = np.where(full.zero > 0, c.dp_overlap_sharded, c.dp_overlap) * whole_step.backward
    each, last_bucket = _buckets(machine, full, (dense + expert) * grad, plain, shards * stride)
    exposed = np.maximum(plain + each - beside, last_bucket)
    nodes = full.tp * full.cp * full.pp * full.dp_replicate * full.dp_shard / cluster.devices_per_node
    noise = np.where((nodes > 1) & (shards * replicas > 1), c.dp_noise * (nodes / 64.0) ** 4, 0.0)
    axis = np.where(shards > 1, np.where(full.zero == 3, sharded, exposed), 0.0)
    owned = (dense + expert) / np.where(full.zero > 0, shards, 1)
    return {
        "communication/dp_shard": axis + noise,
        "communication/dp_replicate": np.where(
            replicas > 1, np.maximum(replica - np.where(shards > 1, 0.0, beside), last_replica), 0.0
        ),
        "accumulate": m * c.accumulate_bytes * (dense + expert) / machine.bandwidth,
        "optimizer": _update(machine, full, owned) + c.update_floor,
    }


def _buckets(machine: Machine, full: Any, num_bytes: Array, seconds: Array, span: Array) -> tuple[Array, Array]:
    """What cutting a reduction into buckets adds (a start-up each), and the last bucket, which nothing hides.

    A stack that reduces after its last backward sends everything at once.
    """
    if not machine.stack.overlaps_gradient_reduction:
        return 0.0, 0.0
    cluster = machine.cluster
    alpha = np.where(span <= cluster.fast_domain, cluster.intra_node.latency, cluster.inter_node.latency)
    count = np.maximum(1.0, np.ceil(num_bytes / full.bucket_bytes))
    return count * alpha, seconds / count + alpha


# host side of an offloaded update: PCIe 4 x16 as reached, and a rank's share of the host's memory bandwidth
_PCIE, _HOST_MEMORY = 25e9, 25e9


def _update(machine: Machine, full: Any, owned: Array) -> Array:
    """The optimizer reads and writes masters and moments; offloaded, it does so on the host across PCIe."""
    precision = machine.precision
    moments = np.where(full.optimizer_bits == 8, 2.0, 8.0)
    states = owned * (2.0 * moments + 2.0 * BYTES[precision.master or precision.param])
    carried = owned * (BYTES[precision.reduce] + BYTES[precision.compute])
    away = carried / _PCIE + states / _HOST_MEMORY
    return np.where(full.offload_optimizer, away, (states + carried) / machine.bandwidth)
