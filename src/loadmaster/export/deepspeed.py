"""DeepSpeed: its JSON configuration."""

from __future__ import annotations

import json
from typing import Any

from loadmaster.describe.plan_file import PlanFile
from loadmaster.describe.precision import Precision
from loadmaster.export.api import Exported, require
from loadmaster.export.launch import launch_script

__all__ = ["config", "files"]


def files(plan: PlanFile) -> Exported:
    """``ds_config.json`` and ``launch.sh``."""
    require(
        plan, "deepspeed", {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "optimizer_bits": 32, "recompute": ("none", "full")}
    )
    if plan.layout.zero and plan.layout.zero < 3:
        require(plan, "deepspeed below stage 3", {"dp_replicate": 1})
    notes = ["call model.gradient_checkpointing_enable()"] if plan.layout.recompute == "full" else []
    words = ["train.py", "--deepspeed", "--deepspeed_config", "ds_config.json"]
    return Exported(
        files={
            "ds_config.json": json.dumps(config(plan), indent=2) + "\n",
            "launch.sh": launch_script(plan.cluster, words, name="deepspeed", comment="train.py is your script"),
        },
        notes=tuple(notes),
    )


def config(plan: PlanFile) -> dict[str, Any]:
    """The document that `deepspeed.initialize` takes."""
    layout, precision = plan.layout, Precision.named(plan.layout.precision)
    zero: dict[str, Any] = {"stage": layout.zero}
    if layout.zero:
        zero |= {
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": layout.bucket_bytes // 2,  # elements, of 2 bytes on the wire
        }
    if layout.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if layout.zero == 3 and layout.dp_replicate > 1:
        zero["zero_hpz_partition_size"] = layout.dp_shard
    return {
        "train_batch_size": plan.workload.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.num_micro_batches(plan.workload),
        "bf16": {"enabled": precision.compute == "bf16"},
        "fp16": {"enabled": precision.compute == "fp16"},
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
    }
