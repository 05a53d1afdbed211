"""The engine: one window of micro-batches is a schedule of actions, then one reduction, one norm, one update.

The order of a step: count the window's tokens over all ranks, run the actions (reducing behind the last backwards),
wait, find inf, unscale, norm, clip, update, scale, average, send the new weights behind the next forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loadmaster.describe.layout import Layout
from loadmaster.ledger import Ledger
from loadmaster.program.window import Action, window_actions
from loadmaster.runtime.accumulate import (
    WindowCount,
    check_window,
    count_window,
    empty_like,
    loss_weight,
)
from loadmaster.runtime.agreement import Agreement, RankFailure
from loadmaster.runtime.assembly import Assembly, assemble
from loadmaster.runtime.clock import PhaseClock
from loadmaster.runtime.loss import CausalLanguageModel, CountFunction, LossFunction, MicroBatch, count_labels
from loadmaster.runtime.memory import memory_ledger
from loadmaster.runtime.norm import clip_factor, sum_of_squares
from loadmaster.runtime.optimizer import OptimizerConfig, step_scale
from loadmaster.runtime.persistence import gradient_shards, load_state, state_shards
from loadmaster.runtime.state import ReadState, StateShard

__all__ = ["Engine", "StepResult", "build"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a window did; equal on every rank but for `seconds`.

    Attributes:
        loss: mean over the counted tokens of all ranks (0 where none counted).
        grad_norm: global, of the mean loss, before clipping.
        tokens: counted tokens (weighted, where weights are given) of all ranks.
        skipped: the weights did not move; `reason` says why.
        loss_scale: the scale this window ran with.
        seconds: by phase.
    """

    loss: float
    grad_norm: float
    tokens: float
    skipped: bool
    reason: str
    loss_scale: float
    seconds: Ledger


def build(
    module: nn.Module, layout: Layout, *, optimizer: OptimizerConfig | None = None, mesh: Any = None,
    device: torch.device | str | None = None, blocks: Sequence[nn.Module] | None = None,
    loss: LossFunction | str | None = None, count: CountFunction | None = None, algorithm: str = "auto",
    timeout: float = 600.0,
) -> Engine:  # fmt: skip
    """Lay `module` out over the data ranks and return the engine that trains it.

    Args:
        module: the same architecture on every rank; rank 0's weights are taken.
        layout: degrees, ZeRO stage, precision, recomputation, bucket size.
        optimizer: what updates the weights.
        mesh: a DeviceMesh with axes dp_replicate and dp_shard; made from the layout when absent.
        device: where to run; the local GPU, else the CPU.
        blocks: the repeated layers; found as the longest list of equal layers when absent.
        loss: (module, micro-batch) to (sum, count), or a kind of next-token cross entropy by name: ``cross_entropy``
            (when absent), ``chunked``, ``fused``.
        count: micro-batch to count before its forward. With a loss of your own and no count, the division
            waits until the last forward.
        algorithm: ``ring``, ``direct``, ``backend``, or ``auto`` (direct on Gloo, the backend's own elsewhere).
        timeout: seconds after which a wait is taken for a hang.

    Raises:
        InvalidInput: the layout needs ranks or axes that are not there, or the module does not suit it.
    """
    assembly = assemble(
        module, layout, optimizer or OptimizerConfig(), mesh=mesh, device=device, blocks=blocks,
        algorithm=algorithm, timeout=timeout,
    )  # fmt: skip
    if loss is None or isinstance(loss, str):
        loss, count = CausalLanguageModel(loss or "cross_entropy"), count or count_labels
    return Engine(assembly, loss, count)


class Engine:
    """Runs windows; see `build`."""

    def __init__(self, assembly: Assembly, loss: LossFunction, count: CountFunction | None) -> None:
        self.assembly = assembly
        self.module, self.layout, self.optimizer = assembly.module, assembly.layout, assembly.optimizer
        self.scaler, self.findings = assembly.scaler, assembly.findings
        self.step_count = 0
        self._loss, self._count = loss, count
        self._model_batch: MicroBatch | None = None
        self._last_seconds = Ledger("seconds", {})
        self._traffic = assembly.meter.record

    @property
    def agreement(self) -> Agreement:
        """Where failures are agreed."""
        return self.assembly.agreement

    def step(self, window: Sequence[MicroBatch]) -> StepResult:
        """One optimizer step over this rank's micro-batches (there may be none).

        Raises:
            RankFailure: this or another rank failed; the same on all (a process alone raises its error as it is).
            InvalidInput: the window is no list of micro-batches.
        """
        batches = check_window(window)
        try:
            return self._step(batches)
        except RankFailure:
            raise
        except Exception as error:
            if self.assembly.communication is None:
                raise  # nobody else has to hear of it
            failure = self.agreement.report(error)
            raise failure from (error if failure.rank == self.agreement.rank else None)

    def _step(self, batches: list[MicroBatch]) -> StepResult:
        parts, clock = self.assembly, PhaseClock(self.assembly.communication)
        parts.meter.begin()
        self._traffic = parts.meter.record
        self.agreement.at(self.step_count, "count")
        if batches:
            self._model_batch = batches[0]
        total = self._agree_on_window(batches)
        if total.count == 0:
            return self._nothing_counted(clock)
        scale = self.scaler.scale if self.scaler else 1.0
        divisor = 1.0 if total.count is None else total.count
        self._begin(clock)
        loss_sum, count = self._run_actions(batches, total, scale / divisor, clock)
        self.agreement.at(self.step_count, "reduce")
        parts.reducer.wait()
        clock.lap("host")
        return self._finish(loss_sum, count, total, scale, clock)

    def _agree_on_window(self, batches: list[MicroBatch]) -> WindowCount:
        rows = self.assembly.exchange([count_window(batches, self._count), float(len(batches))])
        known = self._count is not None
        return WindowCount(
            count=math.fsum(row[0] for row in rows) if known else None,
            micro_batches=tuple(int(row[1]) for row in rows),
        )

    def _nothing_counted(self, clock: PhaseClock) -> StepResult:
        self.step_count += 1
        return self._result(clock, 0.0, 0.0, 0.0, "no token of the window counts on any rank")

    def _begin(self, clock: PhaseClock) -> None:
        self.assembly.begin_window()
        clock.lap("host")

    def _actions(self, batches: list[MicroBatch], total: WindowCount) -> tuple[Action, ...]:
        return window_actions(
            len(batches), total.most, zero=self.assembly.stage, reduce_each=self.layout.reduce_each_micro_batch
        )

    def _run_actions(
        self, batches: list[MicroBatch], total: WindowCount, backward_scale: float, clock: PhaseClock
    ) -> tuple[float, float]:
        """Read the schedule and do what it says; returns this rank's (loss sum, count)."""
        reducer = self.assembly.reducer
        actions = self._actions(batches, total)
        sums: list[tuple[Tensor, Any]] = []
        loss: Tensor | None = None
        for action in actions:
            self.agreement.at(self.step_count, _WORDS[action.kind], action.micro_batch)
            if action.kind == "F":
                batch = (
                    empty_like(self._model_batch, self.assembly.mesh.device)
                    if action.fill
                    else batches[action.micro_batch]
                )
                loss, count = self._forward(batch)
                sums.append((loss.detach(), count))
                clock.lap("forward")
            else:
                assert loss is not None
                reducer.begin_backward(reduce=action.reduce, last=action is actions[-1])
                self._backward(loss, backward_scale)
                reducer.finish_backward()
                loss = None
                clock.lap("backward")
        if not actions:  # an idle rank still meets the others in every bucket
            reducer.begin_backward(reduce=True, last=True)
            reducer.finish_backward()
        return sum(float(s) for s, _ in sums), sum(float(c) for _, c in sums)

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, float | Tensor]:
        weight = loss_weight(batch)
        with self.assembly.autocast():
            total, count = self._loss(self.module, batch)
        return (total, count) if weight == 1.0 else (total * weight, count * weight)

    def _backward(self, loss: Tensor, scale: float) -> None:
        if loss.requires_grad:
            torch.autograd.backward(loss * scale)
        self.assembly.after_backward()

    @torch.no_grad()
    def _finish(self, loss_sum: float, count: float, total: WindowCount, scale: float, clock: PhaseClock) -> StepResult:
        parts = self.assembly
        self.agreement.at(self.step_count, "norm")
        unused = float(parts.reducer.num_unused)
        rows = parts.exchange([sum_of_squares(parts.own_gradients()), loss_sum, count, unused])
        squares = (
            math.fsum(row[0] for row in rows) / parts.gradient_copies if parts.stage else _same([r[0] for r in rows])
        )
        counted = total.count if total.count is not None else math.fsum(row[2] for row in rows)
        loss = math.fsum(row[1] for row in rows) / counted if counted else 0.0
        unscale = 1.0 / scale if total.count is not None else 1.0 / (scale * counted) if counted else 0.0
        norm = math.sqrt(squares) * unscale if math.isfinite(squares) else math.inf
        reason = self._why_skip(counted, squares, rows)
        idle = self._unused_everywhere() if all(row[3] for row in rows) else set()
        if not reason:
            self._update(unscale * clip_factor(norm, parts.config.max_grad_norm), idle)
        if self.scaler and counted:
            self.scaler.update(overflow=bool(reason))
        clock.lap("optimizer")
        self.agreement.at(self.step_count, "done")
        self._learn_once()
        self.step_count += 1
        return self._result(clock, loss, norm if counted else 0.0, counted, reason, scale)

    def _why_skip(self, counted: float, squares: float, rows: list[list[float]]) -> str:
        if not counted:
            return "no token of the window counts on any rank"
        if math.isfinite(squares):
            return ""
        lost = [str(r) for r, row in enumerate(rows) if not math.isfinite(row[1])]
        if lost:
            return f"the loss of rank {', '.join(lost)} is inf or nan"
        return "a gradient is inf or nan though every loss is finite"

    def _unused_everywhere(self) -> set[str]:
        """Parameters without a gradient on any rank; as in PyTorch the optimizer leaves them and their state alone."""
        reducer = self.assembly.reducer
        return reducer.unused_everywhere(self.assembly.exchange(reducer.used_words()))

    def _update(self, factor: float, idle: set[str]) -> None:
        """Scale, step, write back, average, and send the new weights on their way."""
        parts = self.assembly
        if factor != 1.0 and not parts.scales_in_step:
            for gradient in parts.own_gradients():
                gradient.mul_(factor)
        for leaf in parts.leaves:
            if leaf.range.name not in idle:
                leaf.take_gradient()
        with step_scale(self.optimizer, factor if parts.scales_in_step else 1.0, parts.mesh.device):
            self.optimizer.step()
        for leaf in parts.leaves:
            leaf.drop_gradient()
            leaf.write_back()
            if leaf.ema is not None:
                assert parts.config.ema_decay is not None
                leaf.ema.lerp_(leaf.tensor.float(), 1 - parts.config.ema_decay)
        parts.publish()

    def _learn_once(self) -> None:
        """After the first window take rank 0's order of completion; exchanged, so that all have the same."""
        parts = self.assembly
        if self.step_count or parts.stage == 3 or parts.communication is None:
            return
        order = [float(b) for b in parts.reducer.seen] + [-1.0] * (len(parts.reducer.buckets) - len(parts.reducer.seen))
        rows = parts.exchange(order)
        first = next((row for row in rows if row[0] >= 0), []) if order else []
        parts.reducer.learn([int(b) for b in first if b >= 0])

    def _result(
        self, clock: PhaseClock, loss: float, norm: float, tokens: float, reason: str, scale: float = 1.0
    ) -> StepResult:
        self._last_seconds = clock.ledger()
        return StepResult(
            loss=loss, grad_norm=norm, tokens=tokens, skipped=bool(reason), reason=reason, loss_scale=scale,
            seconds=self._last_seconds,
        )  # fmt: skip

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> float:
        """Mean loss over all ranks' batches without a gradient; every rank gives equally many."""
        self.assembly.begin_window()
        sums = [self._forward(batch) for batch in batches]
        self.assembly.wait_for_weights()
        rows = self.assembly.exchange([sum(float(s) for s, _ in sums), sum(float(c) for _, c in sums)])
        count = math.fsum(row[1] for row in rows)
        return math.fsum(row[0] for row in rows) / count if count else 0.0

    def set_lr(self, factor: float) -> None:
        """Set each group's learning rate to `factor` times what it was built with."""
        for group in self.optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def synchronize(self) -> None:
        """Return when the weights are whole and current on this rank (stage 3: its shards)."""
        self.assembly.wait_for_weights()

    def state(self) -> Iterator[StateShard]:
        """This rank's share of weights, masters, optimizer state, average, buffers; all ranks' are whole."""
        self.synchronize()
        return state_shards(self.assembly)

    def gradients(self) -> Iterator[StateShard]:
        """This rank's share of the last window's gradients, as the optimizer saw them."""
        return gradient_shards(self.assembly)

    def load(self, read: ReadState, *, step: int = 0) -> None:
        """Take state from `read`, whatever layout it was saved under."""
        self.synchronize()
        load_state(self.assembly, read)
        self.step_count = step

    def memory_ledger(self) -> Ledger:
        """Bytes this rank holds now, by what they are for."""
        return memory_ledger(self.assembly)

    def traffic_ledger(self) -> Ledger:
        """Bytes this rank sent in the last step, by axis and collective."""
        self.assembly.settle()
        return self._traffic.bytes()

    def message_ledger(self) -> Ledger:
        """Messages this rank sent in the last step."""
        self.assembly.settle()
        return self._traffic.messages()

    def time_ledger(self) -> Ledger:
        """Seconds of the last step by phase; communication is what was waited for."""
        return self._last_seconds

    def close(self) -> None:
        """End the threads and remove the hooks."""
        self.assembly.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_WORDS = {"F": "forward", "B": "backward"}


def _same(squares: list[float]) -> float:
    """At stage 0 every rank holds the whole gradient, to the bit; a rank that differs is broken, and is named."""
    for rank, value in enumerate(squares):
        if value != squares[0] and math.isfinite(value) and math.isfinite(squares[0]):
            raise RuntimeError(
                f"rank {rank}'s reduced gradient has the norm {math.sqrt(value)!r}, rank 0's {math.sqrt(squares[0])!r}"
            )
    return squares[0] if all(math.isfinite(value) for value in squares) else math.inf
