"""The audit: a few real steps in fp32, and what fp16 or bf16 would have made of every number in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from loadmaster.describe.dtype import DType
from loadmaster.describe.precision import Precision
from loadmaster.errors import InvalidInput
from loadmaster.runtime.checkpoint_calls import CheckpointCalls, watch_checkpoints
from loadmaster.runtime.extremes import Exponents, Watch
from loadmaster.runtime.loss import CausalLanguageModel

__all__ = ["Audit", "Finding", "Measured", "audit"]

Batch = Mapping[str, Any] | Tensor
Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing to know.

    Attributes:
        code: stable word for programs, e.g. ``activation_overflow``.
        severity: ``error`` (the run will be wrong or die), ``warning`` or ``note``.
        message: what was measured and what follows; way_out: what to do.
        where: modules or parameters, the worst first.
        figures: the numbers of the message.
    """

    code: str
    severity: str
    message: str
    way_out: str
    where: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As the command prints it."""
        return {
            "code": self.code, "severity": self.severity, "message": self.message, "way_out": self.way_out,
            "where": list(self.where), "figures": dict(self.figures),
        }  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Measured:
    """What the steps showed.

    Attributes:
        outputs, output_gradients: of every leaf module; parameter_gradients: of every parameter.
        updates: nonzero updates, and of them those that bf16 and fp16 weights would not have felt, by parameter.
        no_gradient: trainable parameters that got none in the first backward.
        batch_dependent: layers whose output for a sample depends on its micro-batch.
        half_positions: tables of rotary frequencies kept in half precision.
        losses: by step. seq_len: of the batches, where they have one.
    """

    outputs: dict[str, Exponents] = field(default_factory=dict)
    output_gradients: dict[str, Exponents] = field(default_factory=dict)
    parameter_gradients: dict[str, Exponents] = field(default_factory=dict)
    updates: dict[str, dict[str, int]] = field(default_factory=dict)
    no_gradient: tuple[str, ...] = ()
    batch_dependent: tuple[str, ...] = ()
    half_positions: tuple[str, ...] = ()
    checkpoints: CheckpointCalls = field(default_factory=CheckpointCalls)
    losses: list[float] = field(default_factory=list)
    seq_len: int = 0

    def lost_share(self, dtype: str) -> float:
        """Share of nonzero updates that weights kept in `dtype` alone would have lost."""
        total = sum(row["all"] for row in self.updates.values())
        return sum(row[dtype] for row in self.updates.values()) / total if total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Findings, the worst first, and the one-line answer."""

    precision: str
    findings: tuple[Finding, ...]
    recommendation: str
    measured: Measured

    @property
    def ok(self) -> bool:
        """Nothing found that makes the run wrong."""
        return all(f.severity != "error" for f in self.findings)

    def to_json(self) -> dict[str, Any]:
        """``{"precision", "ok", "recommendation", "findings", "measured"}``."""
        from loadmaster.runtime.audit_rules import summary

        return {
            "precision": self.precision, "ok": self.ok, "recommendation": self.recommendation,
            "findings": [f.to_json() for f in self.findings], "measured": summary(self.measured),
        }  # fmt: skip


def audit(
    target: nn.Module | str | PathLike[str], batches: Sequence[Batch] | None = None, *, steps: int = 3,
    precision: Precision | str | None = None, optimizer: torch.optim.Optimizer | None = None, lr: float = 3e-4,
    eps: float = 1e-8, weight_decay: float = 0.01, loss: Loss | None = None, init_scale: float = 2.0**16,
    **plan_options: Any,
) -> Audit:  # fmt: skip
    """Run `steps` steps and say what half precision would lose.

    Args:
        target: a module, or a plan file (see `loadmaster.runtime.audit_plan` for its options).
        batches: what the module is called with, used in turn: dicts of keyword arguments, or tensors.
        precision: that the run is meant for; a `Precision`, or a name of one.
        optimizer: the one that will be used; AdamW with `lr`, `eps`, `weight_decay` where None.
        loss: (module, batch) to a scalar; the module's own loss, next-token cross entropy, or the mean square of
            what it returns, whichever fits first.
        init_scale: of dynamic loss scaling.

    Raises:
        InvalidInput: no batches, no steps, or a loss that is no finite number in fp32.
    """
    if not isinstance(target, nn.Module):
        from loadmaster.runtime.audit_plan import audit_plan

        return audit_plan(
            target, steps=steps, precision=precision, lr=lr, eps=eps, weight_decay=weight_decay, init_scale=init_scale,
            **plan_options,
        )  # fmt: skip
    from loadmaster.runtime.audit_rules import find, recommend

    wanted = Precision.named(precision) if isinstance(precision, str) else precision or Precision.named("bf16-mixed")
    name = precision if isinstance(precision, str) else _name(wanted)
    if not batches:
        raise InvalidInput("batches", "none", "are needed to run a step", "give at least one")
    if steps < 1:
        raise InvalidInput("steps", steps, "must be at least 1", "use 3")
    chosen = optimizer or torch.optim.AdamW(
        [p for p in target.parameters() if p.requires_grad], lr=lr, eps=eps, weight_decay=weight_decay
    )
    measured = measure(target, batches, chosen, steps=steps, loss=loss or default_loss)
    findings = find(measured, wanted, chosen, init_scale=init_scale)
    return Audit(
        precision=name, findings=findings, recommendation=recommend(measured, wanted, findings), measured=measured
    )


def _name(precision: Precision) -> str:
    from loadmaster.describe.precision import PRECISIONS

    return next((n for n, p in PRECISIONS.items() if p == precision), "custom")


def measure(
    module: nn.Module, batches: Sequence[Batch], optimizer: torch.optim.Optimizer, *, steps: int, loss: Loss
) -> Measured:
    """The steps themselves."""
    measured = Measured(batch_dependent=_batch_dependent(module), half_positions=_half_positions(module))
    module.train()
    for step in range(steps):
        batch = batches[step % len(batches)]
        optimizer.zero_grad(set_to_none=True)
        with Watch(module) as watch, watch_checkpoints() as checkpoints:
            value = loss(module, batch)
            if value.requires_grad:
                value.backward()  # type: ignore[no-untyped-call]
        measured.losses.append(float(value.detach()))
        if not math.isfinite(measured.losses[-1]):
            raise InvalidInput(
                "loss", measured.losses[-1], f"is not finite in fp32 at step {step}", "lower lr, or look at the data"
            )
        _merge(measured, watch, checkpoints)
        if step == 0:
            missing = (n for n, p in module.named_parameters() if p.requires_grad and p.grad is None)
            measured.no_gradient = tuple(missing)
            measured.seq_len = _seq_len(batch)
        _step(module, optimizer, measured)
    return measured


def _merge(measured: Measured, watch: Watch, checkpoints: CheckpointCalls) -> None:
    for into, source in ((measured.outputs, watch.outputs), (measured.output_gradients, watch.gradients)):
        for name, seen in source.items():
            into.setdefault(name, Exponents()).merge(seen)
    measured.checkpoints.calls += checkpoints.calls
    measured.checkpoints.random_not_kept += checkpoints.random_not_kept
    measured.checkpoints.cut_off += checkpoints.cut_off


@torch.no_grad()
def _step(module: nn.Module, optimizer: torch.optim.Optimizer, measured: Measured) -> None:
    """One update; what of it half-precision weights would have felt."""
    parameters = {n: p for n, p in module.named_parameters() if p.grad is not None}
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        measured.parameter_gradients.setdefault(name, Exponents()).add(parameter.grad)
    before = {n: p.detach().float().clone() for n, p in parameters.items()}
    optimizer.step()
    for name, parameter in parameters.items():
        update = parameter.detach().float() - before[name]
        row = measured.updates.setdefault(name, {"all": 0, "bf16": 0, "fp16": 0})
        row["all"] += int(torch.count_nonzero(update))
        for word, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            kept = before[name].to(dtype)
            same = (kept.float() + update).to(dtype) == kept
            row[word] += int(torch.count_nonzero(same & (update != 0)))


def default_loss(module: nn.Module, batch: Batch) -> Tensor:
    """The module's own loss, next-token cross entropy on its logits, or the mean square of what it returns."""
    if isinstance(batch, Tensor):
        return _of_output(module(batch))
    if "labels" not in batch or not isinstance(batch.get("input_ids"), Tensor):
        return _of_output(module(**batch))
    total, count = CausalLanguageModel()(module, dict(batch))
    return total / count.clamp(min=1)


def _of_output(output: Any) -> Tensor:
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    if not isinstance(output, Tensor):
        named = ("logits", "last_hidden_state")
        found = (getattr(output, n, None) for n in named)
        output = next((t for t in found if isinstance(t, Tensor)), output[0] if isinstance(output, tuple) else None)
    if not isinstance(output, Tensor):
        raise InvalidInput("module", "its output", "is no tensor and holds no loss", "give a loss of your own")
    return output if output.ndim == 0 else output.float().square().mean()


def _seq_len(batch: Batch) -> int:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return int(ids.shape[-1]) if isinstance(ids, Tensor) else 0


def _batch_dependent(module: nn.Module) -> tuple[str, ...]:
    kinds = nn.modules.batchnorm._BatchNorm
    return tuple(n for n, m in module.named_modules() if isinstance(m, kinds))


def _half_positions(module: nn.Module) -> tuple[str, ...]:
    named = module.named_buffers()
    return tuple(n for n, b in named if "inv_freq" in n and b.dtype in (torch.float16, torch.bfloat16))


def worst(seen: Mapping[str, Exponents], *, count: int = 5) -> tuple[str, ...]:
    """Names of the largest numbers, the largest first."""
    return tuple(sorted(seen, key=lambda n: -seen[n].largest)[:count])


def limit(name: str) -> float:
    """Largest finite number of a format."""
    return DType.named(name).max
