"""Going on from a checkpoint: whether it fits the run, and the engine's state out of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from loadmaster.errors import InvalidInput
from loadmaster.runtime.checkpoint import Checkpoint
from loadmaster.runtime.engine import Engine
from loadmaster.runtime.run import Run

__all__ = ["Position", "restore", "saved_facts"]

OPTIONAL = ("master", "ema", "buffer")  # kinds that another precision or option of the same run may lack


class Position:
    """How far the run is.

    Attributes:
        step: optimizer steps done; sequence: position in the global order of the data.
    """

    def __init__(self, step: int = 0, sequence: int = 0) -> None:
        self.step, self.sequence = step, sequence


def saved_facts(run: Run, engine: Engine, position: Position, fingerprint: str) -> dict[str, Any]:
    """What a checkpoint tells beside the tensors; nothing in it depends on the layout (which is there to read)."""
    return {
        "sequence": position.sequence, "seed": run.seed, "seq_len": run.workload.seq_len, "data": fingerprint,
        "scaler": engine.scaler.state() if engine.scaler else None, "config": run.config, "factory": run.factory,
        "name": run.name, "layout": run.layout.to_dict(),
    }  # fmt: skip


def restore(folder: Path, run: Run, engine: Engine, fingerprint: str) -> Position:
    """Load `folder` into the engine, on whatever ranks and stage this run has.

    The learning rate follows from the step, the batches from the position, dropout from seed, step and rank: there
    is no generator state to restore.

    Raises:
        InvalidInput: the checkpoint is of another model, data or seed, or damaged.
    """
    saved = Checkpoint.open(folder)
    _check(saved, run, fingerprint)
    shapes = {shard.name: tuple(shard.full_shape) for shard in engine.state() if shard.kind == "param"}
    for name, shape in shapes.items():
        if saved.shapes.get(("param", name)) != shape:
            there = saved.shapes.get(("param", name), "missing")
            raise InvalidInput(
                "checkpoint",
                f"{folder}: {name} is {there}",
                f"the model's is {shape}",
                "resume with the model it was of",
            )
    missing: list[str] = []

    def read(name: str, kind: str, start: int, stop: int) -> Tensor | None:
        found = saved.read(name, kind, start, stop)
        if found is None and kind not in OPTIONAL:
            missing.append(f"{kind} of {name}")
        return found

    engine.load(read, step=saved.step)
    if missing:
        raise InvalidInput(
            "checkpoint", str(folder), f"has no {missing[0]} ({len(missing)} such)",
            "resume with the optimizer and optimizer_bits it was saved with",
        )  # fmt: skip
    if engine.scaler and saved.run.get("scaler"):
        engine.scaler.load(saved.run["scaler"])
    return Position(saved.step, saved.run["sequence"])


def _check(saved: Checkpoint, run: Run, fingerprint: str) -> None:
    for field, mine in (("seq_len", run.workload.seq_len), ("seed", run.seed), ("data", fingerprint)):
        if saved.run.get(field) != mine:
            what = "the text or its tokenizer is another" if field == "data" else f"this run has {mine}"
            raise InvalidInput(f"checkpoint.{field}", saved.run.get(field), what, "resume with what the run began with")
    if saved.step >= run.steps:
        raise InvalidInput(
            "--steps", run.steps, f"the checkpoint is of step {saved.step} already", "ask for more steps"
        )
