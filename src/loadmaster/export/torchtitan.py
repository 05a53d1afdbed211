"""torchtitan: the job's TOML (up to 0.2) and the same as command-line arguments (0.3 on)."""

from __future__ import annotations

from typing import Any

from loadmaster.describe.plan_file import PlanFile
from loadmaster.describe.precision import Precision
from loadmaster.describe.toml import dumps
from loadmaster.errors import InvalidInput
from loadmaster.export.api import Exported, require
from loadmaster.export.launch import launch_script

__all__ = ["files"]

_SCHEDULES = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B", "zb_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}  # fmt: skip
_MODES = {"none": "none", "selective": "selective", "full": "full"}
_MODULES = {"llama": "llama3", "qwen3": "qwen3", "qwen3_moe": "qwen3", "deepseek_v3": "deepseek_v3"}


def files(plan: PlanFile) -> Exported:
    """``torchtitan.toml``, ``torchtitan.args`` and ``launch.sh``."""
    require(plan, "torchtitan", {"zero": (0, 2, 3), "recompute": tuple(_MODES), "optimizer_bits": 32})
    if plan.layout.pp > 1 and plan.layout.schedule not in _SCHEDULES:
        raise InvalidInput(
            "layout.schedule", plan.layout.schedule, "is nothing that torchtitan can run",
            f"use {' or '.join(_SCHEDULES)}",
        )  # fmt: skip
    module, notes = _module(plan)
    sections = {"training": _training(plan), "parallelism": _parallelism(plan)}
    mode = _MODES[plan.layout.recompute]
    toml = {
        "model": {"name": module, "flavor": "FILL_IN"},
        **sections,
        "activation_checkpoint": {"mode": mode, **({"selective_ac_option": "op"} if mode == "selective" else {})},
    }
    words = ["-m", "torchtitan.train", "--job.config_file", "torchtitan.toml"]
    comment = "torchtitan up to 0.2; from 0.3 on replace the last option by $(cat torchtitan.args)"
    return Exported(
        files={
            "torchtitan.toml": dumps(toml),
            "torchtitan.args": "\n".join(_arguments(module, sections, mode)) + "\n",
            "launch.sh": launch_script(plan.cluster, words, name="torchtitan", comment=comment),
        },
        notes=notes,
    )


def _module(plan: PlanFile) -> tuple[str, tuple[str, ...]]:
    family = (plan.config or {}).get("model_type", "")
    module = _MODULES.get(str(family))
    if module is None:
        raise InvalidInput("model.model_type", family, "is no model of torchtitan", f"use one of {', '.join(_MODULES)}")
    shape = ", ".join(
        f"{k}={plan.config[k]}" for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        if plan.config is not None and k in plan.config
    )  # fmt: skip
    return module, (f"name the flavor of {module} that has {shape} (FILL_IN)",)


def _training(plan: PlanFile) -> dict[str, Any]:
    layout, precision = plan.layout, Precision.named(plan.layout.precision)
    # under a pipeline a local batch holds all micro-batches of the step, and the schedule cuts it
    local = layout.micro_batch_size * (layout.num_micro_batches(plan.workload) if layout.pp > 1 else 1)
    return {
        "local_batch_size": local,
        "global_batch_size": plan.workload.global_batch_size,
        "seq_len": plan.workload.seq_len,
        "dtype": "bfloat16" if precision.param == "bf16" else "float32",
        "mixed_precision_param": "bfloat16" if precision.compute == "bf16" else "float32",
        "mixed_precision_reduce": "float32",
        "enable_cpu_offload": layout.offload_optimizer,
    }


def _parallelism(plan: PlanFile) -> dict[str, Any]:
    layout = plan.layout
    piped: dict[str, Any] = {}
    if layout.pp > 1:
        piped = {
            "pipeline_parallel_schedule": _SCHEDULES[layout.schedule],
            "pipeline_parallel_microbatch_size": layout.micro_batch_size,
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
        }
    return {
        "data_parallel_replicate_degree": layout.dp_replicate,
        "data_parallel_shard_degree": layout.dp_shard,
        "fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never",
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "expert_parallel_degree": layout.ep,
        "pipeline_parallel_degree": layout.pp,
        **piped,
    }


def _arguments(module: str, sections: dict[str, dict[str, Any]], mode: str) -> list[str]:
    """One option a line, as torchtitan 0.3 reads them."""
    lines = [f"--module={module}", "--config=FILL_IN"]
    for section, values in sections.items():
        for name, value in values.items():
            if isinstance(value, bool):
                lines.append(f"--{section}.{'' if value else 'no-'}{name}")
            else:
                lines.append(f"--{section}.{name}={value}")
    lines.append(f"activation-checkpoint:{mode}")
    return lines
