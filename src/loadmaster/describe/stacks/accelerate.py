"""Hugging Face Trainer and accelerate: eager modules, whatever dtype the model was loaded in, FSDP where asked."""

from __future__ import annotations

from dataclasses import replace

from loadmaster.describe.stacks.fsdp2 import STACK as FSDP2

TRAINER = "huggingface/transformers src/transformers/trainer.py"

STACK = replace(
    FSDP2,
    name="accelerate",
    title="Hugging Face Trainer / accelerate",
    retains_unsharded=False,
    overlaps_gradient_reduction=True,
    sources=(TRAINER, "huggingface/accelerate src/accelerate/accelerator.py"),
)
