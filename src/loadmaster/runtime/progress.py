"""A run on the terminal: a bar with loss, speed and memory; plain lines where nobody watches."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from loadmaster.runtime.metrics import StepRecord
from loadmaster.units import format_bytes, format_count, format_seconds

__all__ = ["RunProgress", "describe_step"]

LINES = 10  # of a run without a terminal


def describe_step(record: StepRecord) -> str:
    """One line of figures."""
    parts = [f"loss {record.loss:.3f}", f"{format_count(record.tokens_per_second)} tokens/s"]
    if record.mfu is not None:
        parts.append(f"{record.mfu:.1%} MFU")
    elif record.flops_per_second:
        parts.append(f"{format_count(record.flops_per_second)}FLOP/s a rank")
    parts.append(f"memory {format_bytes(record.memory_bytes)}")
    if record.peak_bytes > record.memory_bytes:  # measured by now
        parts[-1] += f", peak {format_bytes(record.peak_bytes)}"
    if record.loss_scale is not None:
        parts.append(f"scale {record.loss_scale:g}")
    if record.skipped:
        parts.append("skipped: a gradient is not finite")
    if record.eval_loss is not None:
        parts.append(f"held-out loss {record.eval_loss:.3f}")
    return " | ".join(parts)


class RunProgress:
    """Shown on stderr by rank 0; `quiet` shows nothing (other ranks)."""

    def __init__(self, steps: int, *, first_step: int = 0, quiet: bool = False) -> None:
        self.steps, self.quiet = steps, quiet
        self.console = Console(stderr=True, emoji=False, quiet=quiet)
        self.live = self.console.is_terminal and not quiet
        self.every = max(1, -(-(steps - first_step) // LINES))
        self.started = time.monotonic()
        self.bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.description}"),
            TimeRemainingColumn(), console=self.console, disable=not self.live,
        )  # fmt: skip
        self.task = self.bar.add_task("starting", total=steps, completed=first_step)

    def __enter__(self) -> RunProgress:
        self.bar.start()
        return self

    def __exit__(self, _t: type[BaseException] | None, _e: BaseException | None, _b: TracebackType | None) -> None:
        self.bar.stop()

    def step(self, record: StepRecord) -> None:
        """Show a step that is done."""
        if self.live:
            self.bar.update(self.task, completed=record.step, description=describe_step(record))
        elif record.step % self.every == 0 or record.step in (1, self.steps) or record.eval_loss is not None:
            spent = format_seconds(time.monotonic() - self.started)
            self.say(f"step {record.step}/{self.steps} | {describe_step(record)} | {spent}")

    def say(self, text: str) -> None:
        """A line of its own."""
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)
