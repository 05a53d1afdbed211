"""What a layout costs: the memory, time and traffic ledgers of one step, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.layout import Layout
from loadmaster.describe.model import Model
from loadmaster.describe.precision import Precision
from loadmaster.describe.stack import Stack
from loadmaster.describe.workload import Workload
from loadmaster.laws.bubble import bubble_fraction
from loadmaster.laws.flops import flops
from loadmaster.laws.interval import Interval, memory_interval, time_interval
from loadmaster.laws.memory import memory_peak
from loadmaster.laws.step import step_interval, time_terms
from loadmaster.laws.tables import held_terms
from loadmaster.laws.traffic import traffic_terms
from loadmaster.ledger import Ledger
from loadmaster.program.dimensions import padded_vocab
from loadmaster.program.legal import check
from loadmaster.program.stages import Stage, assign_stages

__all__ = ["Cost", "price"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One priced layout.

    Attributes:
        memory: bytes at the peak of the worst rank; time: seconds of a step.
        flops: of the whole step over all ranks: forward, backward, recompute, model, hardware.
        rank: a rank of the worst pipeline stage; peak_event: when its memory is at the peak.
        bubble_fraction: idle share of the pipeline, of the whole step.
        memory_interval, time_interval: nine of ten measured values lie inside.
    """

    model: Model
    cluster: Cluster
    workload: Workload
    layout: Layout
    stack: str
    memory: Ledger
    time: Ledger
    flops: Mapping[str, int | float]
    rank: int
    peak_event: str
    bubble_fraction: float
    memory_interval: Interval
    time_interval: Interval

    @property
    def traffic(self) -> Ledger:
        """Bytes the busiest rank sends in a step; counted bucket by bucket when asked for."""
        return Ledger("bytes", traffic_terms(self.model, self.workload, self.layout))

    @property
    def step_seconds(self) -> float:
        """Seconds of one optimizer step."""
        return float(self.time.total)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the global batch a second."""
        return self.tokens / self.step_seconds

    @property
    def tokens(self) -> int:
        """Tokens of a step (a vision model's patches are its tokens)."""
        return self.workload.global_batch_size * (self.model.fixed_seq_len or self.workload.seq_len)

    @property
    def tokens_per_second_per_device(self) -> float:
        """Tokens a second, by device."""
        return self.tokens_per_second / self.cluster.num_devices

    @property
    def peak_flops(self) -> float | None:
        """Dense peak of a device in the compute dtype; None when nobody has published or measured it."""
        return self.cluster.device.peak(Precision.named(self.layout.precision).compute)

    @property
    def flops_per_second_per_device(self) -> float:
        """Model FLOP/s of one device, which needs no peak."""
        return self.flops["model"] / self.step_seconds / self.cluster.num_devices

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over what the devices could do in that time; recompute is not counted."""
        peak = self.peak_flops
        return None if peak is None else self.flops_per_second_per_device / peak

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs, recompute included, over what the devices could do."""
        mfu = self.mfu
        return None if mfu is None else mfu * self.flops["hardware"] / self.flops["model"]

    @property
    def headroom_bytes(self) -> int:
        """Bytes left on the worst rank; negative when it does not fit."""
        return int(self.cluster.memory_bytes - self.memory.total)

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the bytes a rank may use."""
        return self.headroom_bytes >= 0

    @property
    def out_of_memory_probability(self) -> float:
        """Probability that the true peak is beyond the device."""
        return self.memory_interval.probability_above(self.cluster.memory_bytes)

    @property
    def notes(self) -> list[str]:
        """What a reader of the figures has to know."""
        if self.peak_flops is None:
            return [
                f"no peak is known for {self.cluster.device.name}, so no utilisation is given; "
                "loadmaster measure measures one"
            ]
        return []

    def to_json(self, remedies: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """The document that ``loadmaster price --json`` prints: unrounded, bytes, seconds and FLOPs."""
        return {
            "model": _model_json(self.model),
            "layout": self.layout.to_dict(),
            "derived": self._derived(),
            "workload": _fields(self.workload),
            "cluster": _cluster_json(self.cluster),
            "stack": self.stack,
            "memory": {
                **self.memory.to_json(), "low": self.memory_interval.low, "high": self.memory_interval.high,
                "peak_event": self.peak_event, "rank": self.rank,
            },
            "time": {**self.time.to_json(), "low": self.time_interval.low, "high": self.time_interval.high},
            "traffic": self.traffic.to_json(),
            "flops": dict(self.flops),
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_device": self.tokens_per_second_per_device,
            "flops_per_second_per_device": self.flops_per_second_per_device,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "fits": self.fits,
            "out_of_memory_probability": self.out_of_memory_probability,
            "headroom_bytes": self.headroom_bytes,
            "bubble_fraction": self.bubble_fraction,
            "remedies": list(remedies),
            "notes": self.notes,
        }  # fmt: skip

    def _derived(self) -> dict[str, Any]:
        layout = self.layout
        padding = layout.vocab_padding or Stack.named(self.stack).padded_vocab or 1
        return {
            "world_size": layout.world_size,
            "dp": layout.dp,
            "num_micro_batches": layout.num_micro_batches(self.workload),
            "padded_vocab_size": padded_vocab(self.model.vocab_size, layout.tp, padding=padding),
            "layers_per_stage": [stage.num_layers for stage in self._stages()],
            "tokens": self.tokens,
            "attention_flops": "causal" if self.workload.causal else "full",
        }

    def _stages(self) -> tuple[Stage, ...]:
        layout = self.layout
        return assign_stages(
            self.model.num_layers, layout.pp, virtual_stages=layout.virtual_stages, schedule=layout.schedule
        )


def price(
    model: Model, cluster: Cluster, workload: Workload, layout: Layout, *, stack: str | Stack = "loadmaster"
) -> Cost:
    """Price one layout.

    Raises:
        InvalidInput: the layout breaks a rule towards this model, workload or cluster.
    """
    chosen = stack if isinstance(stack, Stack) else Stack.named(stack)
    check(model, workload, layout, cluster)
    peak = memory_peak(model, cluster, workload, layout, chosen)
    memory = Ledger("bytes", _whole({**peak.terms, **_held(model, workload, layout, chosen)}))
    time = Ledger("seconds", _plain(time_terms(model, cluster, workload, layout, chosen)))
    return Cost(
        model=model, cluster=cluster, workload=workload, layout=layout, stack=chosen.name, memory=memory, time=time,
        flops=_plain(flops(model, workload, layout)),
        rank=int(peak.stage) * (layout.world_size // layout.pp),
        peak_event=str(peak.event),
        bubble_fraction=_bubble(workload, layout),
        memory_interval=memory_interval(chosen, memory.total),
        time_interval=time_interval(step_interval(cluster, chosen, workload, layout, float(time.total))),
    )  # fmt: skip


def _held(model: Model, workload: Workload, layout: Layout, stack: Stack) -> dict[str, int]:
    """For our own runtime, what the tables it executes hold, padding included, in place of the closed form's."""
    if stack.name != "loadmaster" or layout.world_size != layout.dp:
        return {}
    return held_terms(model, workload, layout)


def _bubble(workload: Workload, layout: Layout) -> float:
    """Idle share of the pipeline."""
    return float(
        bubble_fraction(
            layout.schedule, pp=layout.pp, num_micro_batches=layout.num_micro_batches(workload),
            virtual_stages=layout.virtual_stages,
        )
    )  # fmt: skip


def _plain(terms: Mapping[str, Any]) -> dict[str, int | float]:
    """Python numbers of NumPy ones."""
    return {name: value.item() if hasattr(value, "item") else value for name, value in terms.items()}


def _whole(terms: Mapping[str, Any]) -> dict[str, int | float]:
    """Byte counts as integers; terms of nothing are left out."""
    return {name: round(value) for name, value in _plain(terms).items() if value}


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _model_json(model: Model) -> dict[str, Any]:
    names = ("name", "num_params", "num_trainable_params", "num_active_params", "matmul_params")
    return {name: getattr(model, name) for name in names}


def _cluster_json(cluster: Cluster) -> dict[str, Any]:
    return {
        "device": cluster.device.name,
        "num_devices": cluster.num_devices,
        "devices_per_node": cluster.devices_per_node,
        "num_nodes": cluster.num_nodes,
        "memory_bytes": cluster.memory_bytes,
        "intra_node": _fields(cluster.intra_node),
        "inter_node": _fields(cluster.inter_node),
    }
