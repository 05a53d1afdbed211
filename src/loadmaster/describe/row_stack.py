"""The training software of a measured row, and what its memory figure counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from loadmaster.describe.layout import Layout
from loadmaster.describe.op import OpKind
from loadmaster.describe.row_cells import Row
from loadmaster.describe.stack import Stack
from loadmaster.describe.stacks.saving import FUSED
from loadmaster.errors import InvalidInput

__all__ = ["MemoryKind", "memory_kind", "row_stack", "row_stage", "unsaid"]


class MemoryKind(StrEnum):
    """What a measured figure counts."""

    ALLOCATED = "allocated"  # live bytes of the framework's allocator
    RESERVED = "reserved"  # what that allocator took from the device
    DEVICE = "device"  # nvidia-smi: reserved and the driver's context
    UNKNOWN = "unknown"  # the source does not say


_FRAMEWORKS: tuple[tuple[str, str], ...] = (
    ("nanotron", "nanotron"), ("megatron-deepspeed", "megatron-deepspeed"), ("kempnerforge", "kempnerforge"),
    ("torchtitan", "torchtitan"), ("llm-foundry", "composer"), ("composer", "composer"), ("megatron", "megatron"),
    ("nemo", "megatron"), ("primus", "megatron"), ("deepspeed", "deepspeed"), ("hf trainer", "accelerate"),
    ("torchtune", "accelerate"), ("litgpt", "accelerate"), ("fms-fsdp", "fsdp2"), ("internevo", "megatron"),
)  # fmt: skip


# reports of runs made before fused attention kernels existed
_BEFORE_FLASH = ("2104.04473", "2205.05198", "2201.11990", "tables.tex@528191942")


def row_stack(row: Row) -> Stack:
    """The software's rules, with what the row says of its kernels and modes.

    Raises:
        InvalidInput: a software that no stack describes.
    """
    text, notes = row.get("framework", "").lower(), row.get("notes", "")
    name = next((stack for word, stack in _FRAMEWORKS if word in text), None)
    if name is None:
        raise InvalidInput("row.framework", row.get("framework", ""), "is no known stack", "name a known framework")
    if name == "accelerate" and re.search(r"zero-?[123]|deepspeed", row.get("sharding", "").lower()):
        name = "deepspeed"  # Trainer hands ZeRO to DeepSpeed
    stack = Stack.named(name)
    changes: dict[str, Any] = {}
    # that release found no fused kernel for attention with dropout, the tests' default
    old = not row.get("attn_kernel") and "(2025-10" in notes and "TINY" in notes
    if row.get("attn_kernel", "") in ("unfused", "local") or old:
        changes["attention"] = "eager"
    liger = "liger" in text or "with liger" in notes.lower()
    if "fused ops/kernels" in notes or liger:
        changes["saving"] = FUSED
    if liger:
        changes["fused"] = ((OpKind.ACTIVATION, OpKind.MULTIPLY),)
    if "CP by all-to-all" in notes:
        changes["attention"] = "flash_all_to_all"
    if name == "torchtitan" and "compile" not in row.get("compile", ""):
        changes["compiled"] = False
    if any(paper in row.get("source_ref", "") for paper in _BEFORE_FLASH):
        changes["attention"] = "eager"
    if re.search(r"async ?tp", notes.lower()):
        changes["overlaps_tensor_parallel"] = True
    if "deterministic-mode" in notes:
        changes["deterministic"] = True
    if "no-gradient-accumulation-fusion" in notes:
        changes["scratch_gradients"] = False
    return stack.variant(**changes)


def row_stage(row: Row, layout: Layout) -> int | str:
    """The pipeline stage whose memory was read, or ``worst``."""
    text = row.get("mem_rank", "").lower()
    if "last rank" in text:
        return layout.pp - 1
    if text in ("rank0", "first rank"):
        return 0
    if not text and "nvidia-smi" in row.get("mem_kind", ""):
        return 0  # read on the first device
    return "worst"


def memory_kind(text: str) -> MemoryKind:
    """What the source's words for its figure mean."""
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
    ("kind of memory", lambda r: bool(r.get("mem_gib")) and memory_kind(r.get("mem_kind", "")) is MemoryKind.UNKNOWN),
    ("micro-batch", lambda r: not r.get("micro_batch")),
    ("sharding", lambda r: not r.get("sharding")),
    ("vocabulary", lambda r: not r.get("vocab")),
    ("recompute (of which blocks)", lambda r: r.get("framework") == "fms-fsdp" and r.get("act_ckpt") == "selective"),
    ("recompute (the software's default)", lambda r: "AC = config defaults" in r.get("notes", "")),
    ("version, and with it the loss", lambda r: r.get("framework") == "torchtitan" and "B200" in r.get("gpu", "")),
    ("experts' own tensor parallelism", lambda r: r.get("etp", "") not in ("", r.get("tp", ""))),
    ("device", lambda r: not r.get("gpu")),
    ("sequence length (it varies)", lambda r: "variable" in r.get("notes", "").lower()),
)


def unsaid(row: Row) -> tuple[str, ...]:
    """What moves memory and is not stated."""
    return tuple(name for name, test in _UNSAID if test(row))
