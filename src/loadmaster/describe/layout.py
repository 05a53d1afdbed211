"""A layout: how a step is laid over ranks. Mesh names are PyTorch's and torchtitan's."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from loadmaster.describe.precision import Precision
from loadmaster.describe.require import flag, one_of, whole
from loadmaster.describe.workload import Workload
from loadmaster.errors import InvalidInput
from loadmaster.units import MIB, parse_count

__all__ = ["AXES", "RECOMPUTE", "SCHEDULES", "Layout"]

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outermost first: tp ranks are neighbours
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v")
RECOMPUTE = ("none", "selective", "full", "blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees and choices of one run; a value that exists is legal in itself (`lower` checks it against a model).

    Attributes:
        dp_replicate, dp_shard: data-parallel replicas and shards; `zero` acts over `dp_shard`.
        tp, pp, cp: tensor, pipeline, context parallel degrees; ep: experts, inside the data ranks.
        zero: 0 whole, 1 optimizer, 2 + gradients, 3 + parameters sharded over dp_shard.
        micro_batch_size: sequences of one forward on one data rank.
        schedule, virtual_stages: pipeline order and model chunks per rank.
        recompute: ``none``, ``selective`` (priced as the attention core), ``full`` (every block), ``blocks`` (the first
            `recompute_blocks` blocks of each stage).
        precision: a name of `Precision.named`; optimizer_bits: 32 or 8.
        bucket_bytes: gradient bytes reduced at once; reduce_each_micro_batch: reduce before the window ends.
        offload_optimizer: moments and masters on the host.

    >>> layout = Layout.parse("tp=2,pp=4,dp_shard=8,zero=1,recompute=full")
    >>> layout.world_size, layout.dp
    (64, 8)
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    micro_batch_size: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    recompute: str = "none"
    recompute_blocks: int = 0
    precision: str = "bf16-mixed"
    optimizer_bits: int = 32
    bucket_bytes: int = 25 * MIB
    reduce_each_micro_batch: bool = False
    offload_optimizer: bool = False
    vocab_padding: int = 0
    replicate_kv_heads: bool = False

    def __post_init__(self) -> None:
        positive = (
            "dp_replicate",
            "dp_shard",
            "tp",
            "pp",
            "cp",
            "ep",
            "micro_batch_size",
            "virtual_stages",
            "bucket_bytes",
        )
        for field in positive:
            whole(f"layout.{field}", getattr(self, field))
        for field in ("recompute_blocks", "vocab_padding"):
            whole(f"layout.{field}", getattr(self, field), least=0)
        for field in ("sequence_parallel", "reduce_each_micro_batch", "offload_optimizer", "replicate_kv_heads"):
            flag(f"layout.{field}", getattr(self, field))
        one_of("layout.zero", self.zero, (0, 1, 2, 3))
        one_of("layout.optimizer_bits", self.optimizer_bits, (32, 8))
        one_of("layout.schedule", self.schedule, SCHEDULES)
        one_of("layout.recompute", self.recompute, RECOMPUTE)
        Precision.named(self.precision)
        if self.recompute_blocks and self.recompute != "blocks":
            raise InvalidInput(
                "layout.recompute_blocks", self.recompute_blocks, "goes with recompute=blocks", "set both"
            )
        if self.virtual_stages > 1 and self.pp == 1:
            raise InvalidInput("layout.virtual_stages", self.virtual_stages, "needs pp > 1", "use virtual_stages=1")
        if self.sequence_parallel and self.tp == 1:
            raise InvalidInput("layout.sequence_parallel", True, "needs tp > 1", "drop sequence_parallel")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``tp=2,pp=4,dp_shard=8``; an empty text is the plain layout.

        Raises:
            InvalidInput: unknown field, or a value that breaks a rule.
        """
        fields = {f.name: f for f in dataclasses.fields(cls)}
        given: dict[str, Any] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = (part.strip() for part in item.partition("="))
            if not equals and name in fields and isinstance(fields[name].default, bool):
                value = "true"
            if name not in fields:
                raise InvalidInput("layout", name, "is not a field of a layout", f"use {', '.join(fields)}")
            if name in given:
                raise InvalidInput(f"layout.{name}", value, "is given twice", "name every field once")
            given[name] = _read(f"layout.{name}", value, fields[name].default)
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """Every field, as `Layout(**...)` takes them."""
        return dataclasses.asdict(self)

    def describe(self) -> str:
        """The fields that differ from the plain layout, as `parse` reads them."""
        plain = Layout()
        parts = [(k, v) for k, v in self.to_dict().items() if v != getattr(plain, k)]
        return ",".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in parts) or "plain"

    @property
    def world_size(self) -> int:
        """Ranks; experts lie inside the data ranks."""
        return self.dp_replicate * self.dp_shard * self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        """Ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    def num_micro_batches(self, workload: Workload) -> int:
        """Forwards of one rank in a step, GBS = micro_batch_size * num_micro_batches * dp.

        Raises:
            InvalidInput: no whole number of micro-batches reaches the global batch; the nearest ones are named.

        >>> Layout(dp_shard=8, micro_batch_size=2).num_micro_batches(Workload(global_batch_size=256, seq_len=1))
        16
        """
        unit = self.dp * self.micro_batch_size
        count, rest = divmod(workload.global_batch_size, unit)
        if rest:
            low, high = count * unit, (count + 1) * unit
            near = f"{low} or {high}" if low else f"{high}"
            raise InvalidInput(
                "workload.global_batch_size", workload.global_batch_size,
                f"is not micro_batch_size * micro-batches * dp = {self.micro_batch_size} * n * {self.dp}",
                f"use a global batch of {near}, another micro_batch_size, or another number of data ranks",
            )  # fmt: skip
        return count


def _read(field: str, text: str, default: object) -> object:
    match default:
        case bool():
            if text.lower() not in ("true", "false", "1", "0"):
                raise InvalidInput(field, text, "is not true or false", "write true or false")
            return text.lower() in ("true", "1")
        case int():
            return parse_count(text, field=field)
        case _:
            return text
