"""Calibration: the few constants that turn work into seconds on a device under a stack, with where they come from.

`catalog/calibration.toml` holds a table of defaults, one table a device and one a stack, written by hand from published
figures; `catalog/calibration_fitted.toml` one a (stack, device) pair, fitted once on published runs by
`benchmarks/fit_step_time.py`: never per model, per layout or per run. The later ones override. A pair that no run
measured takes its device's and its stack's constants, and the interval of the prediction is then the wide one.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["Calibration"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Constants of one (device, stack).

    Attributes:
        gemm_efficiency: share of the dense peak that large products reach; low_efficiency: the same in FP8;
            fp4_efficiency: in FP4.
        gemm_overhead: seconds a product costs beyond its FLOPs (tile and wave tails, launch gaps).
        batched_efficiency: share of the peak of the two batched products of unfused attention.
        attention_efficiency: share of the peak of a fused attention kernel, over its causal FLOPs.
        score_bytes: memory traffic a score element of unfused attention: softmax, mask, dropout; forward + backward.
        memory_efficiency: share of the memory bandwidth that element-wise kernels reach.
        elementwise: traffic of the layer's small ops over what the op table says, forward (fusion, casts).
        eager: the same again where a stack that compiles its blocks runs them uncompiled.
        cast: traffic of narrowing the operands of FP8 products, over reading 2 bytes and writing 1.
        logit_bytes: traffic a logit, loss forward and backward.
        head_efficiency: share of the peak of the output layer's products; head_efficiency_whole: where tp does not
            divide the vocabulary.
        accumulate_bytes: traffic a parameter of adding a micro-batch's gradient.
        op_floor: seconds the host needs to launch one op forward (as much again backward, and recomputed).
        head_floor: seconds of the host a micro-batch: embedding, head, loss, the loop.
        floor_power: how sharply the larger of host and device time wins.
        tp_floor: growth of `op_floor` at eight tensor-parallel ranks of a node (the slowest host sets the pace).
        tp_floor_far: further growth for each node beyond the first that a tensor-parallel group spans.
        pipeline_floor: growth of `op_floor` with tp where pipeline stages lie on different nodes.
        bus_efficiency: share of the links' bandwidth that collectives in a node reach.
        nic_efficiency: the same between nodes.
        tp_latency, tp_latency_far: seconds of each tensor-parallel collective in a node; between nodes, over 16 ranks
            (growing with their number, as a ring's does).
        tp_far_efficiency: share of a node's NICs that a tensor-parallel group across nodes reaches.
        tp_exposed, tp_exposed_async: share of tensor-parallel communication that nothing hides; where the stack
            runs it beside its products.
        ring_share, ring_share_node: share of its NICs' bandwidth that a data ring with several members a node,
            with a whole node, reaches.
        dp_overlap, dp_overlap_sharded: share of the last backward beside which gradients are reduced, whole (ZeRO 0)
            or scattered to their shards (ZeRO 1, 2).
        gather_overlap: share of the compute beside which ZeRO-3 gathers and scatters.
        gather_tax: share of its own seconds by which a hidden collective slows the compute beside it.
        cp_overlap: share of attention beside which keys and values travel.
        ep_exposed: share of the experts' exchange that nothing hides; ep_latency: seconds of each exchange.
        send_exposed: share of the pipeline's sends that nothing hides.
        straggler: growth of layer time for each doubling of the data ranks across nodes.
        dp_noise: seconds a step at 64 nodes, growing with the fourth power of the nodes (what one sweep shows).
        update_floor: seconds of the optimizer step beyond its bytes.
        stall: seconds a micro-batch that a pipeline across nodes may stall (1 - 1/pp of it): it widens the interval, as
            nobody can say which runs do; see nanotron's sweep.
        low, high: 5 % and 95 % of measured over predicted step time.
        source: rows it was fitted on.
    """

    gemm_efficiency: float
    low_efficiency: float
    fp4_efficiency: float
    gemm_overhead: float
    batched_efficiency: float
    attention_efficiency: float
    score_bytes: float
    memory_efficiency: float
    elementwise: float
    eager: float
    cast: float
    logit_bytes: float
    head_efficiency: float
    head_efficiency_whole: float
    accumulate_bytes: float
    op_floor: float
    head_floor: float
    floor_power: float
    tp_floor: float
    tp_floor_far: float
    pipeline_floor: float
    bus_efficiency: float
    nic_efficiency: float
    tp_latency: float
    tp_latency_far: float
    tp_far_efficiency: float
    tp_exposed: float
    tp_exposed_async: float
    ring_share: float
    ring_share_node: float
    dp_overlap: float
    dp_overlap_sharded: float
    gather_overlap: float
    gather_tax: float
    cp_overlap: float
    ep_exposed: float
    ep_latency: float
    send_exposed: float
    straggler: float
    dp_noise: float
    update_floor: float
    stall: float
    low: float
    high: float
    source: str = ""

    @staticmethod
    def of(device: str, stack: str, *, measured: bool = False) -> Calibration:
        """Constants for a device under a stack; `measured`: its rates are what it reached, not what it might.

        >>> Calibration.of("a100-sxm-80gb", "megatron-deepspeed").gemm_efficiency
        0.88
        """
        return _resolve(device, stack, measured)

    @staticmethod
    def reread() -> None:
        """Forget what was read: the catalogue has been written anew."""
        _tables.cache_clear()
        _resolve.cache_clear()

    def changed(self, **constants: float) -> Calibration:
        """The same with some constants replaced (fits, what-if questions)."""
        merged: dict[str, Any] = dict(constants)
        return replace(self, **merged)


@cache
def _tables() -> dict[str, Any]:
    catalog = Path(__file__).with_name("catalog")
    files = ("calibration.toml", "calibration_fitted.toml")
    written, fitted = (tomllib.loads(catalog.joinpath(name).read_text(encoding="utf-8")) for name in files)
    return {**written, "pair": fitted}


@cache
def _resolve(device: str, stack: str, measured: bool) -> Calibration:
    tables = _tables()
    layers = [
        tables["default"], tables["device"].get(device, {}), tables["stack"].get(stack, {}),
        tables["pair"].get(f"{stack}@{device}", {}), tables["measured"] if measured else {},
    ]  # fmt: skip
    known = {f.name for f in fields(Calibration)}
    return Calibration(**{k: v for table in layers for k, v in table.items() if k in known})
