"""Lowering: model, workload and layout become the tables that laws price, the runtime runs and reports draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.layout import Layout
from loadmaster.describe.model import Model
from loadmaster.describe.workload import Workload
from loadmaster.program.buckets import Bucket, buckets_of, stage_in_force
from loadmaster.program.legal import check
from loadmaster.program.params import ParameterTable
from loadmaster.program.ring import Transfer, all_gather_table, reduce_scatter_table
from loadmaster.program.schedule import Schedule, build_schedule
from loadmaster.program.segments import recomputed_blocks
from loadmaster.program.shards import Range, owned_ranges, whole_ranges
from loadmaster.program.stages import Stage, assign_stages
from loadmaster.program.window import Action, window_actions

__all__ = ["Program", "lower"]


@dataclass(frozen=True, kw_only=True)
class Program:
    """The tables of one layout.

    Attributes:
        params: every parameter, as a tp rank holds it.
        stages: which layers sit where; schedule: the order of forwards and backwards of every pipeline rank.
        buckets: gradients in ready order, or the layers of ZeRO-3.
        segments: layers recomputed in backward, by stage index.
        window: forwards and backwards of a data rank with one stage.
    """

    layout: Layout
    workload: Workload
    params: ParameterTable
    stages: tuple[Stage, ...]
    buckets: tuple[Bucket, ...]
    schedule: Schedule
    segments: Mapping[int, tuple[int, ...]]
    window: tuple[Action, ...]

    @cached_property
    def shards(self) -> tuple[tuple[Range, ...], ...]:
        """Ranges of parameters that each rank of `dp_shard` owns, all buckets in turn."""
        if stage_in_force(self.layout) == 0:
            return (tuple(r for bucket in self.buckets for r in whole_ranges(bucket)),)
        count = self.layout.dp_shard
        return tuple(tuple(r for bucket in self.buckets for r in owned_ranges(bucket, k)) for k in range(count))

    def ring(self, rank: int) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
        """What one rank of `dp_shard` sends and receives: its reduce-scatter and its all-gather."""
        size = self.layout.dp_shard
        return reduce_scatter_table(size, rank), all_gather_table(size, rank)


def lower(model: Model, workload: Workload, layout: Layout, cluster: Cluster | None = None) -> Program:
    """The tables of `layout`, checked.

    Raises:
        InvalidInput: the layout breaks a rule towards the model, the workload or the cluster.

    >>> program = lower(Model.from_hf("gpt2"), Workload(global_batch_size=8, seq_len=64), Layout(dp_shard=4, zero=3))
    >>> len(program.buckets), program.params.num_params, [len(r) > 0 for r in program.shards]
    (13, 124439808, [True, True, True, True])
    """
    check(model, workload, layout, cluster)
    params = ParameterTable.from_model(model, tp=layout.tp)
    stages = assign_stages(
        model.num_layers, layout.pp, virtual_stages=layout.virtual_stages if layout.pp > 1 else 1,
        schedule=layout.schedule,
    )  # fmt: skip
    count = layout.num_micro_batches(workload)
    return Program(
        layout=layout,
        workload=workload,
        params=params,
        stages=stages,
        buckets=buckets_of(params, layout),
        schedule=build_schedule(
            layout.schedule, pp=layout.pp, num_micro_batches=count, virtual_stages=layout.virtual_stages
        ),
        segments=_segments(stages, layout),
        window=window_actions(count, count, zero=layout.zero, reduce_each=layout.reduce_each_micro_batch),
    )


def _segments(stages: tuple[Stage, ...], layout: Layout) -> Mapping[int, tuple[int, ...]]:
    """Layers of the model, a stage: those of its blocks that `recompute` picks."""
    return MappingProxyType(
        {
            stage.index: tuple(
                stage.start + i for i in recomputed_blocks(layout.recompute, layout.recompute_blocks, stage.num_layers)
            )
            for stage in stages
        }
    )
