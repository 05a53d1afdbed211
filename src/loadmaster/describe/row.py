"""A measured run as one row of a table: read it into Model, Cluster, Workload, Layout and Stack, or say why not.

The table is tab-separated with a header; its columns are those of docs/validation.md. A cell that is empty was not
stated by the source. Nothing is guessed that would move a prediction: such a row is refused with the field's name.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import Any

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.layout import Layout
from loadmaster.describe.model import Model
from loadmaster.describe.op import OpKind
from loadmaster.describe.row_model import row_model
from loadmaster.describe.stack import Stack
from loadmaster.describe.stacks.saving import FUSED
from loadmaster.describe.workload import Workload
from loadmaster.errors import InvalidInput

__all__ = ["Described", "MemoryKind", "describe_row", "read_rows"]

Row = Mapping[str, str]


class MemoryKind(StrEnum):
    """What a measured figure counts."""

    ALLOCATED = "allocated"  # live bytes of the framework's allocator
    RESERVED = "reserved"  # what that allocator took from the device
    DEVICE = "device"  # nvidia-smi: reserved and the driver's context
    UNKNOWN = "unknown"  # the source does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A row as values.

    Attributes:
        stage: pipeline stage whose memory was measured, or ``worst``.
        memory_kind, memory_bytes: what was measured (None: nothing); step_seconds: of an optimizer step, or None.
        failed: the source says out of memory, or the run did not finish.
        complete: nothing that moves memory was left unsaid (see `_unsaid`); missing: what was.
    """

    row_id: str
    model: Model
    cluster: Cluster
    workload: Workload
    layout: Layout
    stack: Stack
    stage: int | str
    memory_kind: MemoryKind
    memory_bytes: float | None
    step_seconds: float | None
    tokens_per_second_per_device: float | None
    status: str
    missing: tuple[str, ...]

    @property
    def failed(self) -> bool:
        """Out of memory, or not finished."""
        return self.status not in ("ok", "")

    @property
    def complete(self) -> bool:
        """Whether the source states everything that moves memory."""
        return not self.missing


def read_rows(path: str | PathLike[str]) -> Iterator[dict[str, str]]:
    """Rows of a table as dicts.

    Raises:
        InvalidInput: it cannot be read, or has no ``row_id`` column.
    """
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, delimiter="\t")
            if "row_id" not in (reader.fieldnames or ()):
                raise InvalidInput("file", str(path), "has no row_id column", "give a table in the schema of the docs")
            yield from ({k: v or "" for k, v in row.items() if k} for row in reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidInput("file", str(path), f"cannot be read ({error})", "give a tab-separated table") from None


def describe_row(row: Row) -> Described:
    """The row as values.

    Raises:
        InvalidInput: a field that the laws need is missing or has a meaning they do not know.
    """
    model = row_model(row)
    layout = _layout(row)
    dp = layout.dp
    workload = _workload(row, layout, dp)
    layout.num_micro_batches(workload)
    return Described(
        row_id=row["row_id"], model=model, cluster=_cluster(row, layout.world_size), workload=workload, layout=layout,
        stack=_stack(row), stage=_stage(row, layout), memory_kind=_kind(row.get("mem_kind", "")),
        memory_bytes=_float(row, "mem_gib", 1 << 30), step_seconds=_float(row, "step_time_s"),
        tokens_per_second_per_device=_float(row, "tokens_per_s_per_gpu"), status=row.get("status", ""),
        missing=_unsaid(row),
    )  # fmt: skip


# ---- devices

# as sources print them -> catalogue; where a form factor is left out, the SXM board is taken
_DEVICES = {
    "h100-sxm-80gb": "h100-sxm", "h100-80gb": "h100-sxm", "h100": "h100-sxm", "h100-sxm-96gb-hbm2e-500w":
    "h100-sxm-96gb-hbm2e", "h800-80gb": "h800-sxm", "h200": "h200", "b200": "b200", "b200 (power limited)": "b200",
    "gb200": "gb200", "b300": "b300", "gb300": "gb300", "a100-sxm-80gb": "a100-sxm-80gb", "a100-80gb": "a100-sxm-80gb",
    "a100": "a100-sxm-80gb", "a800-80gb": "a800-sxm-80gb", "a100-sxm-40gb": "a100-sxm-40gb",
    "a100-sxm4-40gb": "a100-sxm-40gb", "a100-40gb": "a100-sxm-40gb", "v100-32gb": "v100-sxm-32gb", "v100-16gb":
    "v100-sxm-16gb", "a10g": "a10g", "rtx3090": "rtx3090", "rtx4090": "rtx4090", "a5000": "rtx3090",
    "a6000 ada": "l40s", "rtx a6000": "a6000", "nvidia l40s": "l40s", "mi355x": "mi355x",
    "mi300 (variant not named)": "mi300x", "v100-sxm3-32gb (dgx-2)": "v100-sxm-32gb", "v100": "v100-sxm-32gb",
    "a100-sxm-40gb (dgx a100)": "a100-sxm-40gb", "blackwell (184.3 gib, model not named)": "b200",
}  # fmt: skip


def _cluster(row: Row, world_size: int) -> Cluster:
    name = row.get("gpu", "").strip().lower()
    if name not in _DEVICES:
        raise InvalidInput("row.gpu", row.get("gpu", ""), "is not in the catalogue", "name one of its devices")
    per_node = int(float(row.get("gpus_per_node") or 8))
    cluster = Cluster.parse(f"{per_node}x{_DEVICES[name]}")
    far = _network(row.get("interconnect", ""), per_node)
    if far is not None:
        cluster = replace(cluster, inter_node=replace(cluster.inter_node, bandwidth=far))
    if world_size % per_node == 0:
        return replace(cluster, devices_per_node=per_node, num_nodes=world_size // per_node)
    return cluster.resized(world_size) if world_size <= per_node else _odd(cluster, per_node, world_size)


def _network(text: str, per_node: int) -> float | None:
    """A device's bytes/s between nodes, from ``8x200 Gb/s``, ``400 Gb/s per GPU`` or a node's sum."""
    match = re.search(r"(?:(\d+)x)?(\d+) ?Gb(?:ps|/s)?\b", text)
    if match is None:
        return None
    each = float(match[2]) * 1e9 / 8
    return each if "per GPU" in text else each * int(match[1] or 1) / per_node


def _odd(cluster: Cluster, per_node: int, world_size: int) -> Cluster:
    """Nodes that a run did not fill."""
    share = next(n for n in range(per_node, 0, -1) if world_size % n == 0)
    return replace(cluster, devices_per_node=share, num_nodes=world_size // share)


# ---- workload and layout


def _float(row: Row, field: str, scale: float = 1.0) -> float | None:
    text = row.get(field, "")
    try:
        return float(text) * scale if text else None
    except ValueError:
        raise InvalidInput(f"row.{field}", text, "is no number", "write a plain number") from None


def _int(row: Row, field: str, default: int | None = None) -> int:
    value = _float(row, field)
    if value is None:
        if default is None:
            raise InvalidInput(f"row.{field}", "", "is not stated", "give the run's value")
        return default
    return int(value)


def _devices(row: Row) -> int:
    """Devices; the functional tests' public recipes run on eight where the row leaves it blank."""
    if not row.get("n_gpus") and "default there: 8 GPUs" in row.get("notes", ""):
        return 8
    return _int(row, "n_gpus")


def _workload(row: Row, layout: Layout, dp: int) -> Workload:
    batch = _float(row, "global_batch")
    if batch is None:
        batch = layout.micro_batch_size * dp * _int(row, "grad_accum", 1)
    return Workload(global_batch_size=int(batch), seq_len=_int(row, "seq_len"), loss=_loss(row), **_adapters(row))


_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "c_attn", "qkv_proj", "wqkv"}


def _adapters(row: Row) -> dict[str, Any]:
    """Which weights train; adapters need a rank."""
    mode, notes = row.get("train_mode", ""), row.get("notes", "")
    if mode in ("pretrain", "full_ft", ""):
        return {}
    rank = re.search(r"\br ?= ?(\d+)|rank ?=? ?(\d+)", notes)
    if mode not in ("lora", "qlora") or rank is None:
        raise InvalidInput("row.train_mode", mode, "does not say the adapters' rank", "give a full run, or r=16")
    targets = set(re.findall(r"\b(\w+_proj|c_attn|wqkv)\b", notes))
    attention = bool(targets) and targets <= _ATTENTION
    return {
        "frozen": mode,
        "lora_rank": int(rank[1] or rank[2]),
        "lora_targets": "attention" if attention else "linear",
    }


def _loss(row: Row) -> str:
    """SimuMax's runs fuse the loss with Transformer Engine's kernel, Megatron's tests with its own functions.

    fms-acceleration's kernels replace the loss, but not under LoRA with FSDP; Liger's not under LoRA.
    """
    notes = row.get("notes", "").lower()
    full = row.get("train_mode", "") in ("pretrain", "full_ft", "")
    if "cross-entropy loss fusion on" in notes:
        return "fused"
    if "liger fused" in notes and full:
        return "chunked"
    kernels = "fused ops/kernels" in notes and (full or "fsdp" not in row.get("sharding", ""))
    return "fused_native" if kernels or "cross-entropy-loss-fusion" in notes else "cross_entropy"


def _layout(row: Row) -> Layout:
    tp, pp, cp = _int(row, "tp"), _int(row, "pp"), _int(row, "cp", 1)
    ep = max(1, _int(row, "ep", 1))
    devices = _devices(row)
    dp = devices // (tp * pp * cp)
    if dp * tp * pp * cp != devices:
        raise InvalidInput("row.n_gpus", devices, f"is no multiple of tp*pp*cp = {tp * pp * cp}", "check the degrees")
    shard, zero = _sharding(row, dp)
    virtual = max(1, _int(row, "vpp", 1))
    return Layout(
        dp_replicate=dp // shard, dp_shard=shard, tp=tp, pp=pp, cp=cp, ep=ep, zero=zero,
        sequence_parallel=tp > 1 and _sequence_parallel(row), micro_batch_size=_int(row, "micro_batch"),
        offload_optimizer=_offloads_optimizer(row), virtual_stages=virtual if pp > 1 else 1,
        schedule=_schedule(row, virtual), precision=_precision(row), **_recompute(row),
    )  # fmt: skip


def _offloads_optimizer(row: Row) -> bool:
    """Whether moments lie on the host; any other offload is refused."""
    text = row.get("offload", "").lower()
    if text and not text.startswith("optimizer (cpu"):
        raise InvalidInput(
            "row.offload", row["offload"], "is an offload the laws do not have", "none, or the optimizer"
        )
    return bool(text)


def _sequence_parallel(row: Row) -> bool:
    """As stated; NVIDIA's recipes switch it on with tensor parallelism and do not print it."""
    recipe = "nemo" in row.get("framework", "").lower() or "megatron-bridge" in row.get("framework", "").lower()
    return row.get("sp") == "1" or (not row.get("sp") and recipe)


def _sharding(row: Row, dp: int) -> tuple[int, int]:
    """(ranks a shard group spans, ZeRO stage)."""
    text = row.get("sharding", "").lower()
    rules: tuple[tuple[str, int], ...] = (
        ("zero0", 0), ("ddp", 0), ("none", 0), ("zero1", 1), ("distributed optimizer", 1), ("zero-1", 1),
        ("zero2", 2), ("zero-2", 2), ("shard_grad_op", 2), ("zero3", 3), ("zero-3", 3), ("optim_grads_params", 3),
        ("fsdp", 3), ("hsdp", 3),
    )  # fmt: skip
    for word, zero in rules:
        if word in text:
            inside = re.search(r"within (\d+)", text)
            return (dp if not inside else min(dp, int(inside[1]))), zero
    if dp == 1:
        return 1, 0
    raise InvalidInput("row.sharding", row.get("sharding", ""), "does not say what is sharded", "name a ZeRO stage")


def _schedule(row: Row, virtual: int) -> str:
    notes = row.get("notes", "").lower()
    for word in ("vocab-1", "vocab-2", "interlaced"):
        if word in notes:
            raise InvalidInput("row.notes", word, "spreads the vocabulary over stages", "give the plain placement")
    for word, name in (("zb-v", "zb_v"), ("zbv", "zb_v"), ("zb-1", "zb_h1"), ("zb-2", "zb_h2"), ("v-half", "v_half")):
        if word in notes:
            if name not in ("zb_v", "zb_h1"):
                raise InvalidInput("row.notes", word, "is a schedule the laws do not have", "give a known schedule")
            return name
    return "interleaved_1f1b" if virtual > 1 else "1f1b"


def _recompute(row: Row) -> dict[str, Any]:
    text = row.get("act_ckpt", "").lower()
    if not text or text.startswith("none"):
        return {"recompute": "none"}
    if text.startswith(("full", "one-layer full")):
        return {"recompute": "full"}
    if text in ("selective (attention core)", "selective core_attn", "selective", "selective (op)"):
        return {"recompute": "selective"}
    raise InvalidInput("row.act_ckpt", row["act_ckpt"], "is a recompute mode the laws do not have", "none, full")


_PRECISIONS: tuple[tuple[str, str], ...] = (
    (r"nvfp4", "fp4-master"),
    (r"float8|amp_fp8", "fp8-mixed"),
    (r"fp8", "fp8-master"),
    (r"bf16 \+ fp32 grad|bf16, fp32 grad", "bf16-master"),
    (r"fp16 \(fp16 grads\)", "fp16-master"),
    (r"bf16 mixed precision \(fp32 gradient reduction\)", "bf16-reduce-fp32"),
    (r"bf16 mixed|amp_bf16|bf16 amp", "bf16-mixed"),
    (r"4-bit|nf4|int4|gptq", "bf16"),  # the frozen base; GPTQ's fp16 is as wide
    (r"bfloat16 weights|bf16 weights|bf16-true|pure", "bf16"),
    (r"^bf16|fp16/bf16", "bf16-mixed"),
    (r"^fp16", "fp16-mixed"),
    (r"^fp32", "fp32"),
)


def _precision(row: Row) -> str:
    text = row.get("precision", "").lower()
    if "fp32 sharded master params" in row.get("notes", ""):
        return "bf16-mixed"  # FSDP under accelerate's mixed precision: the shards are fp32
    for pattern, name in _PRECISIONS:
        if re.search(pattern, text) and name:
            return name
    raise InvalidInput("row.precision", row.get("precision", ""), "is not known", "bf16, fp16, fp32 or fp8")


# ---- stack and what was measured

_FRAMEWORKS: tuple[tuple[str, str], ...] = (
    ("nanotron", "nanotron"), ("megatron-deepspeed", "megatron-deepspeed"), ("kempnerforge", "kempnerforge"),
    ("torchtitan", "torchtitan"), ("llm-foundry", "composer"), ("composer", "composer"), ("megatron", "megatron"),
    ("nemo", "megatron"), ("primus", "megatron"), ("deepspeed", "deepspeed"), ("hf trainer", "accelerate"),
    ("torchtune", "accelerate"), ("litgpt", "accelerate"), ("fms-fsdp", "fsdp2"), ("internevo", "megatron"),
)  # fmt: skip


# reports of runs made before fused attention kernels existed
_BEFORE_FLASH = ("2104.04473", "2205.05198", "2201.11990", "tables.tex@528191942")


def _stack(row: Row) -> Stack:
    text = row.get("framework", "").lower()
    name = next((stack for word, stack in _FRAMEWORKS if word in text), None)
    if name is None:
        raise InvalidInput("row.framework", row.get("framework", ""), "is no known stack", "name a known framework")
    stack = Stack.named(name)
    changes: dict[str, Any] = {}
    old = "megatron-core" in text and not row.get("attn_kernel") and "(2025-10" in row.get("notes", "")
    if row.get("attn_kernel", "") in ("unfused", "local") or old:
        changes["attention"] = "eager"
    liger = "liger" in text or "with liger" in row.get("notes", "").lower()
    if "fused ops/kernels" in row.get("notes", "") or liger:
        changes["saving"] = FUSED
    if liger:
        changes["fused"] = ((OpKind.ACTIVATION, OpKind.MULTIPLY),)
    if "CP by all-to-all" in row.get("notes", ""):
        changes["attention"] = "flash_all_to_all"
    if name == "torchtitan" and "compile" not in row.get("compile", ""):
        changes["compiled"] = False
    if any(paper in row.get("source_ref", "") for paper in _BEFORE_FLASH):
        changes["attention"] = "eager"
    if re.search(r"async ?tp", row.get("notes", "").lower()):
        changes["overlaps_tensor_parallel"] = True
    if "deterministic-mode" in row.get("notes", ""):
        changes["deterministic"] = True
    if "no-gradient-accumulation-fusion" in row.get("notes", ""):
        changes["scratch_gradients"] = False
    return stack.variant(**changes)


def _stage(row: Row, layout: Layout) -> int | str:
    text = row.get("mem_rank", "").lower()
    if "last rank" in text:
        return layout.pp - 1
    if text in ("rank0", "first rank"):
        return 0
    if not text and "nvidia-smi" in row.get("mem_kind", ""):
        return 0  # read on the first device
    return "worst"


def _kind(text: str) -> MemoryKind:
    text = text.lower()
    if "nvidia-smi" in text:
        return MemoryKind.DEVICE
    if "reserved per" in text or text.startswith("max_reserved") or "nanotron max_memory" in text:
        return MemoryKind.RESERVED
    if text.startswith(("max_allocated", "max_active")):
        return MemoryKind.ALLOCATED
    return MemoryKind.UNKNOWN


_Test = Callable[[Row], bool]
_UNSAID: tuple[tuple[str, _Test], ...] = (
    ("recompute", lambda r: not r.get("act_ckpt") and "nanotron" not in r.get("framework", "")),
    ("kind of memory", lambda r: bool(r.get("mem_gib")) and _kind(r.get("mem_kind", "")) is MemoryKind.UNKNOWN),
    ("micro-batch", lambda r: not r.get("micro_batch")),
    ("sharding", lambda r: not r.get("sharding")),
    ("vocabulary", lambda r: not r.get("vocab")),
    ("recompute (of which blocks)", lambda r: r.get("framework") == "fms-fsdp" and r.get("act_ckpt") == "selective"),
    ("recompute (the software's default)", lambda r: "AC = config defaults" in r.get("notes", "")),
    ("version, and with it the loss", lambda r: r.get("framework") == "torchtitan" and "B200" in r.get("gpu", "")),
    ("device", lambda r: not r.get("gpu")),
    ("sequence length (it varies)", lambda r: "variable" in r.get("notes", "").lower()),
)


def _unsaid(row: Row) -> tuple[str, ...]:
    """What moves memory and is not stated."""
    return tuple(name for name, test in _UNSAID if test(row))
