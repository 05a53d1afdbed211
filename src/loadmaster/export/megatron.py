"""Megatron-LM: the arguments of ``pretrain_gpt.py``, for decoders shaped like Llama and GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadmaster.describe.plan_file import PlanFile
from loadmaster.describe.precision import Precision
from loadmaster.errors import InvalidInput
from loadmaster.export.api import Exported, require
from loadmaster.export.launch import launch_script

__all__ = ["arguments", "files"]

_LLAMA = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")


def files(plan: PlanFile) -> Exported:
    """``megatron.args`` (one option a line) and ``launch.sh``."""
    require(
        plan, "Megatron-LM",
        {"zero": (0, 1), "optimizer_bits": 32, "schedule": ("1f1b", "interleaved_1f1b")},
    )  # fmt: skip
    options = arguments(plan)
    lines = [name if value is True else f"{name} {value}" for name, value in options.items()]
    words = ["pretrain_gpt.py"]
    for name, value in options.items():
        words += [name] if value is True else [name, str(value)]
    return Exported(
        files={
            "megatron.args": "\n".join(lines) + "\n",
            "launch.sh": launch_script(plan.cluster, words, name="megatron", comment="add --data-path and a tokenizer"),
        },
        notes=("data, tokenizer and learning rate are yours to add",),
    )


def arguments(plan: PlanFile) -> dict[str, Any]:
    """Options and values; True where an option takes none."""
    layout, work = plan.layout, plan.workload
    options: dict[str, Any] = {
        **_model(plan),
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--context-parallel-size": layout.cp,
        "--micro-batch-size": layout.micro_batch_size,
        "--global-batch-size": work.global_batch_size,
        "--seq-length": work.seq_len,
        "--use-mcore-models": True,
        "--transformer-impl": "transformer_engine",
        **_precision(layout.precision),
        **_recompute(plan),
    }
    if layout.ep > 1:
        options["--expert-model-parallel-size"] = layout.ep
    if layout.sequence_parallel:
        options["--sequence-parallel"] = True
    if layout.virtual_stages > 1:
        options["--num-virtual-stages-per-pipeline-rank"] = layout.virtual_stages
    if layout.zero:
        options |= {
            "--use-distributed-optimizer": True,
            "--overlap-grad-reduce": True,
            "--overlap-param-gather": True,
        }
        if layout.dp_replicate > 1:
            options["--num-distributed-optimizer-instances"] = layout.dp_replicate
    if layout.offload_optimizer:
        options |= {"--optimizer-cpu-offload": True, "--optimizer-offload-fraction": 1.0}
    return options


def _precision(name: str) -> dict[str, Any]:
    compute = Precision.named(name).compute
    return {"bf16": {"--bf16": True}, "fp16": {"--fp16": True}}.get(compute, {})


def _recompute(plan: PlanFile) -> dict[str, Any]:
    layout = plan.layout
    match layout.recompute:
        case "selective":
            return {"--recompute-granularity": "selective"}
        case "full":
            return {
                "--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": 1,
            }  # fmt: skip
        case "blocks":
            return {
                "--recompute-granularity": "full", "--recompute-method": "block",
                "--recompute-num-layers": layout.recompute_blocks,
            }  # fmt: skip
        case _:
            return {}


def _model(plan: PlanFile) -> dict[str, Any]:
    """The architecture, from the Hugging Face config."""
    config = plan.config or {}
    family = str(config.get("model_type", ""))
    if family == "gpt2":
        return _gpt2(config)
    if family not in _LLAMA:
        raise InvalidInput(
            "model.model_type", family, "is not written out for Megatron-LM", f"use one of gpt2, {', '.join(_LLAMA)}"
        )
    heads = int(config["num_attention_heads"])
    kv = int(config.get("num_key_value_heads") or heads)
    options: dict[str, Any] = {
        "--num-layers": config["num_hidden_layers"],
        "--hidden-size": config["hidden_size"],
        "--ffn-hidden-size": config["intermediate_size"],
        "--num-attention-heads": heads,
        "--max-position-embeddings": config.get("max_position_embeddings", plan.workload.seq_len),
        "--position-embedding-type": "rope",
        "--rotary-base": round(_rope_theta(config)),
        "--normalization": "RMSNorm",
        "--norm-epsilon": config.get("rms_norm_eps", 1e-5),
        "--swiglu": True,
        "--disable-bias-linear": True,
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
        "--vocab-size": config["vocab_size"],
    }
    if kv != heads:
        options |= {"--group-query-attention": True, "--num-query-groups": kv}
    if config.get("head_dim"):
        options["--kv-channels"] = config["head_dim"]
    if not config.get("tie_word_embeddings", False):
        options["--untie-embeddings-and-output-weights"] = True
    if family == "qwen2":
        options["--add-qkv-bias"] = True
    if family.startswith("qwen3"):
        options["--qk-layernorm"] = True
    return options | _experts(config)


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    count = config.get("num_local_experts") or config.get("num_experts")
    if not count:
        return {}
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    return {
        "--num-experts": count,
        "--moe-router-topk": config["num_experts_per_tok"],
        "--moe-ffn-hidden-size": width,
        "--moe-grouped-gemm": True,
        "--moe-token-dispatcher-type": "alltoall",
    }


def _rope_theta(config: Mapping[str, Any]) -> float:
    return float((config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta") or 10000.0)


def _gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "--num-layers": config["n_layer"],
        "--hidden-size": config["n_embd"],
        "--num-attention-heads": config["n_head"],
        "--max-position-embeddings": config["n_positions"],
        "--position-embedding-type": "learned_absolute",
        "--vocab-size": config["vocab_size"],
    }
