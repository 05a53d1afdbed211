"""One JSON object a step in ``metrics.jsonl``, and the same scalars for TensorBoard."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from loadmaster.errors import InvalidInput

__all__ = ["Metrics", "StepRecord", "read_metrics"]

FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What a step did.

    Attributes:
        step: counted from 1; loss: mean nats per counted token of the global batch; grad_norm: before clipping.
        tokens: counted tokens of the step; seconds: of the whole step.
        mfu: None where the device's peak is not known; flops_per_second: model FLOP/s of one rank.
        memory_bytes, peak_bytes: live after the step, and the most so far, on rank 0.
        loss_scale: of fp16, else None; skipped: the update was dropped (gradient not finite).
        eval_loss: where the step was followed by an evaluation.
    """

    step: int
    loss: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    mfu: float | None
    memory_bytes: int
    peak_bytes: int
    loss_scale: float | None
    seconds: float
    learning_rate: float
    flops_per_second: float
    skipped: bool = False
    eval_loss: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Every field; a number that is none (NaN, infinity) as None, which JSON has."""
        fields = dataclasses.asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}


class Metrics:
    """Writes the records of rank 0; a resumed run drops what an earlier one wrote beyond `first_step`."""

    def __init__(self, folder: Path, *, first_step: int = 0, tensorboard: bool = True) -> None:
        self.path = folder / FILE
        kept = [row for row in read_metrics(folder) if row["step"] <= first_step] if first_step else []
        part = self.path.with_suffix(".part")
        part.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        part.replace(self.path)
        self.file = self.path.open("a", encoding="utf-8", buffering=1)
        self.board: Any = _board(folder, first_step) if tensorboard else None

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, _t: type[BaseException] | None, _e: BaseException | None, _b: TracebackType | None) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()

    def write(self, record: StepRecord) -> None:
        """Append one step."""
        row = record.to_json()
        self.file.write(json.dumps(row) + "\n")
        if self.board is not None:
            for name, number in row.items():
                if name != "step" and number is not None:
                    self.board.add_scalar(name, number, record.step)


def _board(folder: Path, first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, a last line that a crash cut off left out.

    Raises:
        InvalidInput: a line before the last is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        return []
    rows, lines = [], path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise InvalidInput("metrics", f"{path}:{number}", "is no JSON", "remove the line") from None
    return rows
