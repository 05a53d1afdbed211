"""Seconds of a step, term by term: blocks, stages, pipeline, gradients, update; one law for one layout or a million.

The slowest pipeline stage sets the beat; the others' fill and drain is the bubble; gradients, gathers and the update
come on top as far as the stack hides them. Constants come from `Calibration`; shapes from the model's coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from loadmaster.describe.calibration import Calibration
from loadmaster.describe.cluster import Cluster
from loadmaster.describe.layout import Layout
from loadmaster.describe.model import Model
from loadmaster.describe.stack import Stack
from loadmaster.describe.workload import Workload
from loadmaster.laws.bubble import bubble_seconds
from loadmaster.laws.coefficients import ModelCoefficients, coefficients
from loadmaster.laws.layer import LayerTimes, Machine, layer_times
from loadmaster.laws.network import gradient_seconds, send_seconds

__all__ = ["StageSeconds", "stage_seconds", "step_interval", "time_terms"]

Array = Any

# layouts priced in one go: a column of them stays in a core's cache
_CHUNK = 1 << 14
# what one block's time depends on: layouts that agree in these are priced once
_LAYER_COLUMNS = ("tp", "cp", "ep", "micro_batch_size", "sequence_parallel")
_COLUMNS = (*_LAYER_COLUMNS, "pp", "dp_replicate", "dp_shard", "zero", "virtual_stages", "recompute_blocks",
            "bucket_bytes", "optimizer_bits", "reduce_each_micro_batch", "offload_optimizer")  # fmt: skip


class Columns:
    """A layout's fields as arrays (or numbers), categorical ones as they are."""

    def __init__(self, layout: Any, fields: dict[str, Array]) -> None:
        self.recompute, self.schedule, self.precision = layout.recompute, layout.schedule, layout.precision
        for name, value in fields.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Array:  # for the type checker: the fields are those of Layout
        raise AttributeError(name)


def time_terms(
    model: Model, cluster: Cluster, workload: Workload, layout: Any, stack: Stack, *,
    constants: Calibration | None = None,
) -> dict[str, Array]:  # fmt: skip
    """Seconds of a step by term; `layout` is a `Layout` or anything with its fields as columns.

    Args:
        constants: instead of the catalogue's (fits).
    """
    columns = [np.atleast_1d(np.asarray(getattr(layout, name))) for name in _COLUMNS]
    arrays = np.broadcast_arrays(*columns)
    machine = Machine.of(cluster, stack, layout.precision, constants)
    numbers, count = coefficients(model), len(arrays[0])
    parts = []
    for start in range(0, count, _CHUNK):
        fields = {n: a[start : start + _CHUNK] for n, a in zip(_COLUMNS, arrays, strict=True)}
        parts.append(_terms(numbers, machine, workload, Columns(layout, fields)))
    if isinstance(layout, Layout):
        return {name: float(np.asarray(value).reshape(-1)[0]) for name, value in parts[0].items()}
    if len(parts) == 1:
        return parts[0]
    sizes = [min(_CHUNK, count - i * _CHUNK) for i in range(len(parts))]
    return {n: np.concatenate([np.broadcast_to(part[n], size) for part, size in zip(parts, sizes, strict=True)])
            for n in parts[0]}  # fmt: skip


def step_interval(
    cluster: Cluster, stack: Stack, workload: Workload, layout: Any, seconds: Array
) -> tuple[Array, Array]:
    """Seconds between which 90 % of measured steps fall, for this device and stack, around the predicted `seconds`.

    The upper one allows for the stall per micro-batch that runs of a stack with stages on several nodes may show.
    """
    c = Calibration.of(cluster.device.name, stack.name, measured=cluster.device.measured)
    dp = layout.dp_replicate * layout.dp_shard
    micro_batches = workload.global_batch_size / (dp * layout.micro_batch_size)
    world = layout.tp * layout.cp * layout.pp * dp
    stalls = np.where(world > cluster.devices_per_node, c.stall * (1.0 - 1.0 / np.asarray(layout.pp)), 0.0)
    return c.low * seconds, c.high * seconds + micro_batches * stalls[()]


def _unique(full: Columns) -> tuple[Columns, Array]:
    """The distinct combinations of what a block's time depends on, and where each layout finds its own."""
    key = np.zeros(full.tp.shape, dtype=np.int64)
    for name in _LAYER_COLUMNS:
        key = key * 8192 + getattr(full, name).astype(np.int64)
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return Columns(full, {name: getattr(full, name)[first] for name in _LAYER_COLUMNS}), inverse


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Sums over the layers of a model (mean a layer) and its ends, one micro-batch, every layout's own."""

    layer: LayerTimes
    embedding: Array
    head_forward: Array
    head_backward: Array
    head_tp: Array


def _beat(numbers: ModelCoefficients, machine: Machine, workload: Workload, full: Columns) -> Beat:
    small, inverse = _unique(full)
    total = dict.fromkeys(LayerTimes.__slots__, 0.0)
    for block, count in numbers.blocks:
        times = layer_times(block, machine, workload, small)
        for name in total:
            total[name] = total[name] + count / numbers.num_layers * getattr(times, name)
    spread = {n: np.broadcast_to(v, inverse.shape if np.ndim(v) == 0 else np.shape(v)) for n, v in total.items()}
    mean = LayerTimes(**{n: v if v.shape == inverse.shape and np.ndim(total[n]) == 0 else v[inverse]
                         for n, v in spread.items()})  # fmt: skip
    ends = [np.broadcast_to(v, small.tp.shape)[inverse] for v in _ends(numbers, machine, workload, small)]
    return Beat(layer=mean, embedding=ends[0], head_forward=ends[1], head_backward=ends[2], head_tp=ends[3])


def _ends(numbers: ModelCoefficients, machine: Machine, workload: Workload, small: Columns) -> tuple[Array, ...]:
    """Embedding, head forward, head backward, head's collectives: loss traffic rides on the logits."""
    c, t = machine.constants, small.tp
    tokens = small.micro_batch_size * numbers.head.seq_len(workload.seq_len) / small.cp
    splits = t if machine.stack.splits_vocab else 1
    embedding = 3.0 * machine.element * tokens * numbers.embedding.width / machine.bandwidth
    inner = sum(p.rows * p.d_in * p.d_out for p in numbers.head.products)
    efficiency = np.where(np.asarray(splits) > 1, c.head_efficiency, c.head_efficiency_whole)
    forward = 2.0 * tokens * inner / splits / (efficiency * machine.peak)
    loss = c.logit_bytes * tokens * numbers.vocab_size / splits / machine.bandwidth if inner else 0.0
    bus = c.bus_efficiency * machine.cluster.intra_node.bandwidth
    traffic = 2.0 * (t - 1) / t * machine.element * numbers.embedding.width * tokens
    tp = np.where(t > 1, 2.0 * (c.tp_latency + traffic / bus), 0.0)
    return embedding, forward + loss / 3.0, 2.0 * (forward + loss / 3.0), tp


def _stage_layers(numbers: ModelCoefficients, stack: Stack, full: Columns) -> tuple[Array, Array, Array]:
    """Layers on the first, a middle and the last rank."""
    layers, p, v = numbers.num_layers, full.pp, np.maximum(full.virtual_stages, 1)
    chunks = p * v
    quotient, rest = layers // chunks, layers % chunks
    # chunk c holds quotient + (c < rest) layers; rank r holds chunks r, r + p, ...
    whole, part = rest // p, rest % p
    first = v * quotient + whole + (part > 0)
    last = v * quotient + whole + (part >= p)
    if stack.placement == "cost":
        first, last = _placed_by_cost(numbers, p)
    middle = np.where(p > 2, np.maximum(first, -(-(layers - first - last) // np.maximum(p - 2, 1))), 0)
    if stack.placement == "cost":
        middle = np.where(p > 2, -(-(layers - first - last) // np.maximum(p - 2, 1)), 0)
    return first, middle, np.where(p > 1, last, 0)


def _placed_by_cost(numbers: ModelCoefficients, p: Array) -> tuple[Array, Array]:
    """Blocks go to a stage until their cumulative products reach its share, the head's included (nanotron's rule)."""
    inner = sum(n * q.rows * q.d_in * q.d_out * q.top_k for block, n in numbers.blocks for q in block.products)
    head = sum(q.rows * q.d_in * q.d_out for q in numbers.head.products)
    layers = numbers.num_layers
    share = (layers + head / (inner / layers)) / p
    first = np.minimum(layers, np.ceil(share - 1e-9).astype(np.int64))
    before_last = np.minimum(layers, np.ceil((p - 1) * share - 1e-9).astype(np.int64))
    return np.where(p > 1, first, layers), np.where(p > 1, layers - before_last, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds of one layer and of the ends, one micro-batch, host and stragglers included.

    Attributes:
        slower: of a layer, host or device; host: what the host adds; whole: with the wait for stragglers.
        again, tp_again: recomputed compute and collectives; head, head_device: with and without the host's floor.
    """

    beat: Beat
    again: Array
    tp_again: Array
    slower: Array
    host: Array
    straggle: Array
    whole: Array
    head: Array
    head_device: Array

    @property
    def forward(self) -> Array:
        """A layer's forward, half the host's and the collectives' time in it."""
        return self.beat.layer.forward + self.beat.layer.tp / 2 + self.host / 2


def _pace(numbers: ModelCoefficients, machine: Machine, workload: Workload, full: Columns) -> Pace:
    c, dp = machine.constants, full.dp_replicate * full.dp_shard
    beat = _beat(numbers, machine, workload, full)
    layer = beat.layer
    share = _recompute_share(numbers, full)
    again, tp_again = share * layer.again, share * layer.tp_again
    # host and device: whichever is slower, smoothly
    spread = (dp > 1) & (full.tp * full.cp * dp > machine.cluster.fast_domain)
    straggle = c.straggler * np.where(spread, np.log2(dp * full.cp), 0.0)  # all that add up gradients wait
    device = layer.forward + layer.backward + again + layer.tp + tp_again + layer.cp + layer.ep
    passes = 2.0 + share * (full.recompute in ("full", "blocks"))
    bare = layer.floor * passes
    slack = np.maximum(0.0, 1.0 - device / np.maximum(bare, 1e-12))
    floor = bare * _pipeline_floor(machine, full, slack)
    slower = device + floor * (np.power(1.0 + np.power(device / np.maximum(floor, 1e-12), c.floor_power),
                                        1.0 / c.floor_power) - device / np.maximum(floor, 1e-12))  # fmt: skip
    host = slower - device
    whole = slower * (1.0 + straggle)
    head_device = beat.head_forward + beat.head_backward + beat.head_tp + beat.embedding
    return Pace(
        beat=beat, again=again, tp_again=tp_again, slower=slower, host=host, straggle=straggle, whole=whole,
        head=np.sqrt(head_device**2 + c.head_floor**2), head_device=head_device,
    )  # fmt: skip


def _terms(numbers: ModelCoefficients, machine: Machine, workload: Workload, full: Columns) -> dict[str, Array]:
    p, v = full.pp, np.maximum(full.virtual_stages, 1)
    dp = full.dp_replicate * full.dp_shard
    m = np.maximum(1.0, workload.global_batch_size / (dp * full.micro_batch_size))
    pace = _pace(numbers, machine, workload, full)
    beat, layer, again, host, whole, head = pace.beat, pace.beat.layer, pace.again, pace.host, pace.whole, pace.head
    first, middle, last = _stage_layers(numbers, machine.stack, full)
    embedding = np.where(p > 1, beat.embedding, 0.0)
    ends = np.stack([first * whole + np.where(p > 1, embedding, head), middle * whole, last * whole + head])
    worst = np.argmax(ends, axis=0)
    slowest = np.max(ends, axis=0)
    layers_worst = np.choose(worst, [first, middle, last])
    head_worst = np.where((worst == 2) | (p == 1), 1.0, 0.0)
    every = numbers.num_layers * whole + np.where(p > 1, head + embedding, head)

    send = send_seconds(machine, workload, numbers.embedding.width, full)
    # one micro-batch's way through all stages, less the slowest one's share of it, is what the pipeline idles
    idle = _idle_share(full, beat, again)
    bubble = idle * np.maximum(every - slowest, 0.0)
    sends = np.where(p > 1, (m * v + (p - 1)) * send, 0.0)
    gradients = gradient_seconds(
        numbers, machine, full, first, np.where(p > 1, last, first), m, trained=_trained_share(numbers, workload),
        whole_step=Work(forward=layers_worst * pace.forward, backward=layers_worst * (pace.slower - pace.forward)),
    )  # fmt: skip
    scale = m * layers_worst
    return {
        "forward": scale * layer.forward + m * head_worst * (beat.head_forward + beat.embedding),
        "backward": scale * layer.backward + m * head_worst * beat.head_backward,
        "recompute": scale * again,
        "communication/tp": scale * (layer.tp + pace.tp_again) + m * head_worst * beat.head_tp,
        "communication/cp": scale * layer.cp,
        "communication/ep": scale * layer.ep,
        "communication/pp": sends,
        "host": scale * host + m * head_worst * (head - pace.head_device),
        "straggler": scale * pace.slower * pace.straggle,
        "bubble": bubble,
        **gradients,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """What a schedule's table needs to be replayed: seconds of each stage in model order, one micro-batch.

    Attributes:
        forward, backward: of stage i of pp * virtual_stages, the sends it waits for included.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]


def stage_seconds(
    model: Model, cluster: Cluster, workload: Workload, layout: Layout, stack: Stack, layers: tuple[int, ...]
) -> StageSeconds:
    """Seconds of every stage of one layout that holds `layers` of the model; the replay's side of `time_terms`."""
    names = (*_COLUMNS, "virtual_stages")
    full = Columns(layout, {name: np.atleast_1d(np.asarray(getattr(layout, name))) for name in names})
    machine = Machine.of(cluster, stack, layout.precision, None)
    numbers = coefficients(model)
    pace = _pace(numbers, machine, workload, full)
    send = float(send_seconds(machine, workload, numbers.embedding.width, full)[0]) if layout.pp > 1 else 0.0
    forward, whole, head = float(pace.forward[0]), float(pace.whole[0]), float(pace.head[0])
    embedding = float(pace.beat.embedding[0])
    ahead = [count * forward + send / 2 for count in layers]
    back = [count * (whole - forward) + send / 2 for count in layers]
    ahead[0] += embedding / 3 if layout.pp > 1 else 0.0
    back[0] += 2 * embedding / 3 if layout.pp > 1 else 0.0
    ahead[-1] += head / 3
    back[-1] += 2 * head / 3
    return StageSeconds(forward=tuple(ahead), backward=tuple(back))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Seconds of the slowest stage's forward and backward, one micro-batch: what communication can hide beside."""

    forward: Array
    backward: Array


def _trained_share(numbers: ModelCoefficients, workload: Workload) -> float:
    """Share of the weights with gradients and moments: adapters of rank r hold r (d_in + d_out) for d_in d_out."""
    if workload.frozen == "none":
        return 1.0
    products = [p for block, _ in numbers.blocks for p in block.products]
    whole = sum(p.d_in * p.d_out for p in products)
    return min(1.0, workload.lora_rank * sum(p.d_in + p.d_out for p in products) / max(whole, 1))


def _recompute_share(numbers: ModelCoefficients, full: Columns) -> Array:
    """Share of the layers that run forward twice."""
    match full.recompute:
        case "blocks":
            return np.minimum(1.0, full.recompute_blocks * full.pp / numbers.num_layers)
        case "none":
            return 0.0
        case _:
            return 1.0


def _pipeline_floor(machine: Machine, full: Columns, slack: Array) -> Array:
    """Growth of the host floor with tp, and more where stages lie on other nodes (nanotron's sweep shows it)."""
    per_node = machine.cluster.devices_per_node
    world = full.tp * full.cp * full.pp * full.dp_replicate * full.dp_shard
    crosses = (full.tp > 1) & (full.pp > 1) & (world > per_node)
    # the hosts of a group of eight, over both sockets of a node, wait for each other most: unless the device is busy
    inside = machine.constants.tp_floor * np.power((np.minimum(full.tp, per_node) - 1.0) / 7.0, 2.5) * slack
    inside = inside + machine.constants.tp_floor_far * (np.maximum(full.tp / per_node, 1.0) - 1.0)
    return 1.0 + inside + np.where(crosses, machine.constants.pipeline_floor * np.power(full.tp / 2.0, 1.1), 0.0)


def _idle_share(full: Columns, beat: Beat, again: Array) -> Array:
    """Idle time of the schedule over that of 1F1B."""
    layer = beat.layer
    forward = layer.forward + layer.tp / 2
    backward = layer.backward + again + layer.tp / 2
    args: dict[str, Any] = {
        "pp": 2,
        "forward": forward,
        "backward_input": backward / 2,
        "backward_weight": backward / 2,
    }
    plain = bubble_seconds("1f1b", virtual_stages=1, **args)
    return bubble_seconds(full.schedule, virtual_stages=np.maximum(full.virtual_stages, 1), **args) / plain
