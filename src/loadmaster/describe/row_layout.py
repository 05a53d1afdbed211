"""The layout and the workload of a measured row."""

from __future__ import annotations

import re
from typing import Any

from loadmaster.describe.layout import Layout
from loadmaster.describe.row_cells import Row, count, number
from loadmaster.describe.workload import Workload
from loadmaster.errors import InvalidInput

__all__ = ["row_layout", "row_workload"]


def _devices(row: Row) -> int:
    """Devices; the functional tests' public recipes run on eight where the row leaves it blank."""
    if not row.get("n_gpus") and "default there: 8 GPUs" in row.get("notes", ""):
        return 8
    return count(row, "n_gpus")


def row_workload(row: Row, layout: Layout, dp: int) -> Workload:
    """The step's work; the global batch, where it is blank, from the micro-batches."""
    batch = number(row, "global_batch")
    if batch is None:
        batch = layout.micro_batch_size * dp * count(row, "grad_accum", 1)
    return Workload(global_batch_size=int(batch), seq_len=count(row, "seq_len"), loss=_loss(row), **_adapters(row))


_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "c_attn", "qkv_proj", "wqkv"}


def _adapters(row: Row) -> dict[str, Any]:
    """Which weights train; adapters need a rank."""
    mode, notes = row.get("train_mode", ""), row.get("notes", "")
    if mode in ("pretrain", "full_ft", ""):
        return {}
    if "lora(emb)" in notes or "embedding and output layer trainable" in notes:
        raise InvalidInput("row.notes", "lora(emb)", "trains whole embeddings beside adapters", "give plain adapters")
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


def row_layout(row: Row) -> Layout:
    """Degrees and choices.

    Raises:
        InvalidInput: a cell that the laws need is missing or has a meaning they do not know.
    """
    tp, pp, cp = count(row, "tp"), count(row, "pp"), count(row, "cp", 1)
    ep = max(1, count(row, "ep", 1))
    devices = _devices(row)
    dp = devices // (tp * pp * cp)
    if dp * tp * pp * cp != devices:
        raise InvalidInput("row.n_gpus", devices, f"is no multiple of tp*pp*cp = {tp * pp * cp}", "check the degrees")
    shard, zero = _sharding(row, dp)
    virtual = max(1, count(row, "vpp", 1))
    return Layout(
        dp_replicate=dp // shard, dp_shard=shard, tp=tp, pp=pp, cp=cp, ep=ep, zero=zero,
        sequence_parallel=tp > 1 and _sequence_parallel(row), micro_batch_size=count(row, "micro_batch"),
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
    if row.get("train_mode") in ("lora", "qlora") and text.startswith("bf16"):
        return "bf16"  # a frozen base is loaded in half precision
    for pattern, name in _PRECISIONS:
        if re.search(pattern, text) and name:
            return name
    raise InvalidInput("row.precision", row.get("precision", ""), "is not known", "bf16, fp16, fp32 or fp8")
