"""Assembly: from a module and a layout to buckets, collectives, leaves and an optimizer, all wired together."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loadmaster.describe.layout import Layout
from loadmaster.describe.precision import Precision, Rounding
from loadmaster.errors import InvalidInput
from loadmaster.program.buckets import Bucket, buckets_of, stage_in_force
from loadmaster.program.params import EMBEDDING, ParameterTable
from loadmaster.program.ring import Algorithm
from loadmaster.program.shards import Range
from loadmaster.runtime.accumulate import batch_dependent_layers
from loadmaster.runtime.agreement import Agreement
from loadmaster.runtime.communication import Communication
from loadmaster.runtime.mesh import Axis, DataMesh, data_mesh
from loadmaster.runtime.optimizer import Leaf, OptimizerConfig, build_optimizer, make_leaf, scales_in_step
from loadmaster.runtime.parameters import DTYPES, broadcast, cast_parameters, find_blocks, parameter_table
from loadmaster.runtime.recompute import recompute_blocks
from loadmaster.runtime.reducer import BufferPool, GradientBucket, Reducer
from loadmaster.runtime.ring import Collectives, collectives_for
from loadmaster.runtime.scaler import LossScaler
from loadmaster.runtime.traffic import TrafficMeter
from loadmaster.runtime.units import Unit, wrap_units
from loadmaster.runtime.waits import WeightWaits
from loadmaster.runtime.zero import Gathered, ParameterBucket

__all__ = ["Assembly", "assemble", "find_blocks"]


@dataclass(slots=True, kw_only=True, eq=False)
class Assembly:
    """Everything a step touches.

    Attributes:
        stage: ZeRO stage in force (0 where dp_shard is 1: there is nothing to shard over).
        table: every parameter; buckets hold the trainable ones' gradients, weights the sharded parameters.
        leaves: what the optimizer updates on this rank.
        findings: what the user should know about the module, by name.
    """

    module: nn.Module
    layout: Layout
    config: OptimizerConfig
    precision: Precision
    mesh: DataMesh
    stage: int
    table: ParameterTable
    named: dict[str, Tensor]
    meter: TrafficMeter
    agreement: Agreement
    communication: Communication | None
    control: Collectives | None
    collectives: tuple[Collectives, ...]
    pool: BufferPool | None
    reducer: Reducer
    weights: list[ParameterBucket]
    units: list[Unit]
    leaves: list[Leaf]
    optimizer: torch.optim.Optimizer
    scaler: LossScaler | None
    findings: dict[str, str]
    waits: WeightWaits

    @property
    def scales_in_step(self) -> bool:
        """Whether unscaling and clipping cost no pass of their own."""
        return scales_in_step(self.optimizer, self.leaves)

    @property
    def gradient_copies(self) -> int:
        """Ranks that hold the same chunk of a sharded gradient."""
        return self.mesh.replicate.size

    def own_gradients(self) -> list[Tensor]:
        """The reduced gradients this rank holds, flat: whole at stage 0, its chunks above."""
        return [b.shard if self.stage else _whole(b) for b in self.reducer.buckets]

    def exchange(self, values: list[float]) -> list[list[float]]:
        """Every data rank's `values`, by rank; a small message each."""
        if self.control is None or self.communication is None:
            return [values]
        control, size = self.control, self.mesh.data.size
        buffer = torch.zeros(size, len(values), dtype=torch.float64, device=self.mesh.device)
        buffer[self.mesh.data.rank] = torch.tensor(values, dtype=torch.float64)
        self.communication.submit("control/exchange", lambda: control.all_gather(buffer.view(-1))).wait()
        rows: list[list[float]] = buffer.tolist()
        return rows

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Mixed precision: 16-bit compute on wider weights."""
        compute, param = self.precision.compute, self.precision.param
        if compute == param or compute not in ("bf16", "fp16"):
            return contextlib.nullcontext()
        return torch.autocast(self.mesh.device.type, dtype=DTYPES[compute])

    def begin_window(self) -> None:
        """Before the first action: forget old gradients; at stage 3 gather what lies outside the blocks."""
        self.reducer.begin_window()
        self.waits.begin()
        if self.stage == 3:
            self.units[-1].gather()
            self.units[0].gather()
            self.units[-1].ready()

    def after_backward(self) -> None:
        """After a micro-batch's backward: close blocks whose inputs needed no gradient."""
        for unit in reversed(self.units[:-1]):
            unit.after_backward()
            unit.free()

    def publish(self) -> None:
        """After the update: send each rank's new weights to the others, in the order the next forward needs them."""
        if self.stage in (1, 2):
            for bucket in reversed(self.weights):
                bucket.gather()
        elif self.stage == 3:
            self.units[-1].free()

    def settle(self) -> None:
        """Return when everything issued has run."""
        if self.communication is not None:
            self.communication.submit("control/settle", lambda: None).wait()

    def wait_for_weights(self) -> None:
        """Return when no gather of weights is under way; at stage 3 leave only the shards."""
        for bucket in self.weights:
            bucket.free() if bucket.free_after_use else bucket.wait()

    def close(self) -> None:
        """Remove hooks, end threads."""
        self.reducer.close()
        self.waits.close()
        if self.communication is not None:
            self.communication.close()
        self.agreement.close()


def assemble(
    module: nn.Module, layout: Layout, config: OptimizerConfig, *, mesh: Any, device: torch.device | str | None,
    blocks: Sequence[nn.Module] | None, algorithm: str, timeout: float,
) -> Assembly:  # fmt: skip
    """Build the assembly; collective over all data ranks."""
    where = data_mesh(layout, mesh=mesh, device=device)
    stage = stage_in_force(layout)
    precision = Precision.named(layout.precision)
    _refuse(layout)
    module.to(where.device)
    cast_parameters(module, precision)
    broadcast(module, where.data)
    meter = TrafficMeter()
    agreement = Agreement(where.data.rank, where.data.size, timeout=timeout)
    communication = Communication(where.device, meter, agreement.check) if where.data.size > 1 else None
    chosen = _algorithm(algorithm, where)
    shard, replicate, control = (
        collectives_for(axis, chosen, meter, piece_bytes=layout.bucket_bytes) if axis.size > 1 else None
        for axis in (where.shard, where.replicate, _renamed(where.data, "control"))
    )
    layers = list(blocks) if blocks is not None else find_blocks(module)
    recompute_blocks(layers, layout)
    table, named = parameter_table(module, layers)
    pool = BufferPool(where.device) if stage >= 2 or (stage == 1 and layout.reduce_each_micro_batch) else None
    tables = buckets_of(table, layout)
    weights = _weights(tables, named, where, stage, shard, communication)
    gradients = _gradients(tables, named, precision, where, pool)
    reducer = Reducer(
        gradients, communication, shard=shard, replicate=replicate, gather_gradients=stage == 0,
        by_count=stage != 3, wire=_wire(precision), on_hook=agreement.look,
    )  # fmt: skip
    units = _units(layers, weights, gradients, reducer) if stage == 3 else []
    leaves = _leaves(gradients, weights, named, precision, layout, config, stage)
    return Assembly(
        module=module, layout=layout, config=config, precision=precision, mesh=where, stage=stage, table=table,
        named=named, meter=meter, agreement=agreement, communication=communication, control=control,
        collectives=tuple(c for c in (shard, replicate, control) if c is not None), pool=pool, reducer=reducer,
        weights=weights, units=units, leaves=leaves, optimizer=build_optimizer(
            config, leaves, named, stochastic=precision.rounding is Rounding.STOCHASTIC
        ),
        scaler=LossScaler() if precision.loss_scaling else None, findings=_find(module),
        waits=WeightWaits(module, layers, weights if stage in (1, 2) else []),
    )  # fmt: skip


def _refuse(layout: Layout) -> None:
    if layout.reduce_each_micro_batch and layout.zero == 0:
        raise InvalidInput(
            "layout.reduce_each_micro_batch", True, "saves nothing while every rank keeps the whole gradient",
            "use zero=1 or higher, or drop it",
        )  # fmt: skip


def _algorithm(name: str, mesh: DataMesh) -> Algorithm:
    if name == "auto":
        return Algorithm.DIRECT if mesh.backend == "gloo" else Algorithm.BACKEND
    if name not in tuple(Algorithm):
        raise InvalidInput("algorithm", name, "is not known", f"use auto, {', '.join(Algorithm)}")
    return Algorithm(name)


def _renamed(axis: Axis, name: str) -> Axis:
    return Axis(name=name, size=axis.size, rank=axis.rank, group=axis.group)


def _wire(precision: Precision) -> torch.dtype:
    return DTYPES[precision.reduce]


def _params(bucket: Bucket, named: dict[str, Tensor]) -> list[Tensor]:
    return [named[entry.name] for entry in bucket.entries]


def _weights(
    tables: Iterable[Bucket], named: dict[str, Tensor], mesh: DataMesh, stage: int, shard: Collectives | None,
    communication: Communication | None,
) -> list[ParameterBucket]:  # fmt: skip
    if stage == 0:
        return []
    gathered = Gathered()
    return [
        ParameterBucket(
            t, _params(t, named), rank=mesh.shard.rank, free_after_use=stage == 3, shard=shard,
            communication=communication, gathered=gathered,
        )
        for t in tables
    ]  # fmt: skip


def _gradients(
    tables: Iterable[Bucket], named: dict[str, Tensor], precision: Precision, mesh: DataMesh, pool: BufferPool | None
) -> list[GradientBucket]:
    made = []
    for table in tables:
        if table.trainable:
            params = _params(table, named)
            dtype = DTYPES[precision.grad]
            if params[0].dtype == torch.float64:
                dtype = torch.float64
            made.append(GradientBucket(table, params, dtype=dtype, shard_rank=mesh.shard.rank, pool=pool))
    return made


def _units(
    layers: Sequence[nn.Module], weights: list[ParameterBucket], gradients: list[GradientBucket], reducer: Reducer
) -> list[Unit]:
    """One unit a block in forward order, then the one outside the blocks."""

    def unit(index: int) -> Unit:
        mine = [w for w in weights if w.table.unit == index]
        issued = [b for b, g in enumerate(gradients) if g.table.unit == index]

        def reduce() -> None:
            for b in issued:
                reducer.issue(b)

        return Unit(index, mine, reduce)

    units = [unit(i) for i in range(len(layers))]
    wrap_units(layers, units)
    return [*units, unit(EMBEDDING)]


def _leaves(
    gradients: list[GradientBucket], weights: list[ParameterBucket], named: dict[str, Tensor], precision: Precision,
    layout: Layout, config: OptimizerConfig, stage: int,
) -> list[Leaf]:  # fmt: skip
    master = DTYPES[precision.master] if precision.master else None
    by_index = {w.table.index: w for w in weights}
    leaves = []
    for bucket in gradients:
        for place, weight, gradient in _places(bucket, by_index.get(bucket.table.index), stage):
            shape = _full_shape(named[place.name], bucket, place)
            leaf = make_leaf(place, shape, weight, gradient, master=master, offload=layout.offload_optimizer)
            if config.ema_decay is not None:
                leaf.ema = leaf.tensor.detach().float().clone()
            leaves.append(leaf)
    return leaves


def _places(
    bucket: GradientBucket, weight: ParameterBucket | None, stage: int
) -> Iterable[tuple[Range, Tensor, Tensor]]:
    """(range, its weights, its reduced gradient) of every leaf in a bucket."""
    if stage == 0:
        for entry, param, view in zip(bucket.table.entries, bucket.params, bucket.views, strict=True):
            yield Range(name=entry.name, start=0, stop=entry.numel, offset=entry.offset), param, view
        return
    assert weight is not None
    for place in weight.ranges():
        piece = slice(place.offset, place.offset + place.numel)
        yield place, weight.shard[piece], bucket.shard[piece]


def _full_shape(param: Tensor, bucket: GradientBucket, place: Range) -> tuple[int, ...]:
    return tuple(param.shape)


def _whole(bucket: GradientBucket) -> Tensor:
    assert bucket.buffer is not None
    return bucket.buffer


def _find(module: nn.Module) -> dict[str, str]:
    found = batch_dependent_layers(module)
    for name, effect in found.items():
        warnings.warn(f"{name or 'the module'}: {effect}", stacklevel=5)
    return found
