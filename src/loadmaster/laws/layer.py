"""Seconds of one block for one micro-batch on one rank: products, attention, small ops, tensor-parallel collectives.

    product    max(2 M K N / (efficiency peak) + overhead, bytes / bandwidth), three times: forward, input's and
               weights' gradient
    attention  fused: FLOPs of the mean keys / rate, 2.5 times that backward; unfused: two batched products over the
               full square, plus the traffic of the scores
    small ops  elements read and written (op table) / bandwidth, twice that backward
    tp         alpha + 2 (t - 1) / t bytes / bus bandwidth for each all-reduce of the stream
Everything broadcasts over the layout's columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from loadmaster.describe.calibration import Calibration
from loadmaster.describe.cluster import Cluster
from loadmaster.describe.precision import BYTES, Precision
from loadmaster.describe.stack import Stack
from loadmaster.describe.workload import Workload
from loadmaster.laws.coefficients import BlockCoefficients, Core, Product

__all__ = ["LayerTimes", "Machine", "layer_times"]

Array = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates of a cluster's device under a stack.

    Attributes:
        peak, low_peak: dense FLOP/s of the compute dtype, of the dtype of the blocks' products.
        bandwidth: bytes/s that kernels reach.
    """

    cluster: Cluster
    constants: Calibration
    stack: Stack
    precision: Precision
    peak: float
    low_peak: float
    bandwidth: float

    @staticmethod
    def of(cluster: Cluster, stack: Stack, precision: str, constants: Calibration | None = None) -> Machine:
        """Resolve the constants; a device without a known peak is taken at its fp32 or a nominal rate."""
        found = constants or Calibration.of(cluster.device.name, stack.name, measured=cluster.device.measured)
        dtypes = stack.precision(precision)
        peak = cluster.device.peak(dtypes.compute) or cluster.device.peak("fp16") or cluster.device.peak("fp32") or 1e12
        low = cluster.device.peak(dtypes.matmul) if dtypes.matmul else None
        bandwidth = cluster.device.memory_bandwidth * found.memory_efficiency
        return Machine(cluster=cluster, constants=found, stack=stack, precision=dtypes, peak=peak, low_peak=low or peak,
                       bandwidth=bandwidth)  # fmt: skip

    @property
    def low(self) -> bool:
        """The blocks' products run in a narrower dtype than the rest, and the device has it."""
        return self.low_peak != self.peak

    @property
    def element(self) -> int:
        """Bytes of an activation element."""
        return BYTES[self.precision.compute]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds of one block, one micro-batch.

    Attributes:
        forward, backward: device time; again: what recompute adds, collectives left out.
        tp, tp_again: exposed tensor-parallel collectives, forward and backward together; of the recompute.
        cp, ep: exposed context-parallel and expert exchanges.
        floor: host seconds of a forward (backward and recompute cost as much again).
    """

    forward: Array
    backward: Array
    again: Array
    tp: Array
    tp_again: Array
    cp: Array
    ep: Array
    floor: Array


def layer_times(block: BlockCoefficients, machine: Machine, workload: Workload, layout: Any) -> LayerTimes:
    """Price one block for the layout's columns."""
    c, seq = machine.constants, block.seq_len(workload.seq_len)
    tokens = layout.micro_batch_size * seq / layout.cp
    trains = workload.frozen == "none"
    forward = backward = 0.0
    for product in block.products:
        once, back = _product(product, machine, tokens, layout, trains)
        forward, backward = forward + once, backward + back
    core_forward = 0.0
    for core in block.cores:
        once, back = _core(core, machine, seq, layout)
        core_forward, backward = core_forward + once, backward + back
    stream = np.where(layout.sequence_parallel, layout.tp, 1)
    elements = block.stream_elements / stream + block.split_elements / layout.tp
    passes = c.elementwise * (1.0 if machine.stack.compiled else c.eager)
    small = passes * machine.element * tokens * elements / machine.bandwidth
    whole = forward + core_forward + small
    some = core_forward
    if machine.stack.selective_matmuls:
        some = forward / 2.0 + small  # torchtitan keeps attention's output and every second product's
    again = {"full": whole, "blocks": whole, "selective": some}
    forward, backward = forward + core_forward + small, backward + 2.0 * small
    reduce = _tp_reduce(block, machine, tokens, layout)
    tp = (block.reductions + block.backward_reductions) * reduce
    tp_again = block.reductions * reduce if layout.recompute in ("full", "blocks") else 0.0
    return LayerTimes(
        forward=forward, backward=backward, again=again.get(layout.recompute, 0.0), tp=tp, tp_again=tp_again,
        cp=_cp(block, machine, tokens, core_forward, layout), ep=_ep(block, machine, tokens, layout),
        floor=c.op_floor * block.num_ops,
    )  # fmt: skip


def _product(p: Product, machine: Machine, tokens: Array, layout: Any, trains: bool) -> tuple[Array, Array]:
    """Forward and backward seconds of one product."""
    c, element = machine.constants, machine.element
    rows = (layout.micro_batch_size if p.per_sample else tokens) * p.rows
    copies = 1
    if p.num_experts > 1:
        rows, copies = rows * p.top_k, np.maximum(p.num_experts / layout.ep, 1.0)
    t = layout.tp if p.split else 1
    d_in = p.d_in / t if p.split == "row" else p.d_in
    d_out = p.d_out / t if p.split == "column" else p.d_out
    rate = c.gemm_efficiency * machine.peak
    traffic = element * (rows * (d_in + d_out) + copies * d_in * d_out)
    cast = 0.0
    if machine.low:
        narrow = c.fp4_efficiency if machine.precision.matmul == "nvfp4" else c.low_efficiency
        rate = narrow * machine.low_peak
        cast = c.cast * 3.0 * (rows * d_in + copies * d_in * d_out) / machine.bandwidth
    once = np.maximum(2.0 * rows * d_in * d_out / rate + c.gemm_overhead, traffic / machine.bandwidth)
    return once + cast, (2.0 if trains else 1.0) * (once + cast)


def _core(core: Core, machine: Machine, seq: int, layout: Any) -> tuple[Array, Array]:
    """Forward and backward seconds of an attention core."""
    c, a = machine.constants, core.attention
    t = layout.tp if core.split else 1
    length = core.queries or seq
    queries = layout.micro_batch_size * length / (1 if core.queries else layout.cp)
    width = 2.0 * a.num_heads / t * (a.head_dim + a.v_head_dim)
    if machine.stack.attention != "eager":
        once = width * queries * a.mean_keys(length, count_causal=True) / (c.attention_efficiency * machine.peak)
        return once, 2.5 * once
    square = queries * a.mean_keys(length, count_causal=False)
    products = width * square / (c.batched_efficiency * machine.peak)
    scores = c.score_bytes / 3.0 * a.num_heads / t * square / machine.bandwidth
    return products + scores, 2.0 * (products + scores)


def _tp_reduce(block: BlockCoefficients, machine: Machine, tokens: Array, layout: Any) -> Array:
    """Exposed seconds of one all-reduce (or gather and scatter) of the stream over tp."""
    c, cluster, t = machine.constants, machine.cluster, layout.tp
    near = t <= cluster.fast_domain
    bandwidth = np.where(
        near, c.bus_efficiency * cluster.intra_node.bandwidth,
        c.tp_far_efficiency * cluster.inter_node.bandwidth * cluster.devices_per_node,
    )  # fmt: skip
    alpha = np.where(near, c.tp_latency, c.tp_latency_far * np.asarray(t) / 16.0)
    traffic = 2.0 * (t - 1) / t * machine.element * block.width * tokens
    exposed = c.tp_exposed_async if machine.stack.overlaps_tensor_parallel else c.tp_exposed
    return np.where(np.asarray(t) > 1, exposed * (alpha + traffic / bandwidth), 0.0)


def _cp(block: BlockCoefficients, machine: Machine, tokens: Array, core: Array, layout: Any) -> Array:
    """Exposed seconds of the ring of keys and values, forward and (twice as much) backward."""
    if not block.cores:
        return 0.0
    c, cluster = machine.constants, machine.cluster
    near = layout.tp * layout.cp <= cluster.fast_domain
    bandwidth = np.where(
        near, c.bus_efficiency * cluster.intra_node.bandwidth, c.nic_efficiency * cluster.inter_node.bandwidth
    )
    width = sum(core_.attention.num_kv_heads * (core_.attention.head_dim + core_.attention.v_head_dim)
                for core_ in block.cores)  # fmt: skip
    if machine.stack.attention.endswith("all_to_all"):  # queries and outputs travel too, once each, beside nothing
        heads = sum(2 * one.attention.num_heads * one.attention.head_dim for one in block.cores)
        sent = (1.0 - 1.0 / layout.cp) * machine.element * tokens * (width + heads) / layout.tp
        return 3.0 * sent / bandwidth
    seconds = (layout.cp - 1) * machine.element * tokens * width / layout.tp / bandwidth
    hops = (layout.cp - 1) * np.where(near, cluster.intra_node.latency, cluster.inter_node.latency)
    return 3.0 * (np.maximum(seconds - c.cp_overlap * core, 0.0) + hops)


def _ep(block: BlockCoefficients, machine: Machine, tokens: Array, layout: Any) -> Array:
    """Exposed seconds of dispatch and combine, forward and backward."""
    if not block.exchanges:
        return 0.0
    c, cluster = machine.constants, machine.cluster
    inside = np.minimum(layout.ep, np.maximum(1, cluster.fast_domain // layout.tp))
    domains = np.maximum(1.0, layout.ep / inside)
    each = machine.element * tokens * block.width / np.where(layout.sequence_parallel, layout.tp, 1)
    near = (1.0 - 1.0 / layout.ep) * block.top_k * each / (c.bus_efficiency * cluster.intra_node.bandwidth)
    # a token crosses once to each other node that holds one of its experts
    others = (domains - 1.0) * (1.0 - (1.0 - 1.0 / domains) ** block.top_k)
    far = others * each / (c.nic_efficiency * cluster.inter_node.bandwidth)
    seconds = c.ep_latency + np.maximum(near, far)
    return np.where(np.asarray(layout.ep) > 1, 2.0 * block.exchanges * c.ep_exposed * seconds, 0.0)
