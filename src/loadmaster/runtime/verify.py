"""Does this layout compute the same as one process? Judged on loss, gradient norm, gradients and weights, step by step.

The reference is plain PyTorch: one module, the whole global batch in one forward, one mean over its counted tokens,
one optimizer. The layout runs the engine on real ranks. Sequences ignore different numbers of tokens and the last
micro-batch is short, so that a mean of means, a sum not divided or a tensor counted twice shows. After each step the
reference goes on from the layout's weights: every step is judged by itself, and the rounding that Adam's first steps
blow up in near-zero gradients does not add up.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from os import PathLike
from typing import Any

from loadmaster.describe.layout import Layout
from loadmaster.describe.plan_file import PlanFile
from loadmaster.describe.precision import Precision
from loadmaster.describe.require import real, whole
from loadmaster.errors import InvalidInput
from loadmaster.ranks import run_ranks

__all__ = ["StepDifference", "Verification", "verify"]

# relative difference of gradients allowed: rounding in another order of summation, in the compute dtype
TOLERANCES = {"fp32": 2e-5, "tf32": 2e-2, "bf16": 5e-2, "fp16": 2e-2}
MAX_LOCAL_RANKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """One step, this layout against one process.

    Attributes:
        loss, reference_loss, grad_norm, reference_grad_norm: as they came out.
        gradient: |g - g_ref| / |g_ref| over all parameters; worst: the parameter that differs most, by the same
            measure against the largest gradient of any parameter.
        weight: |w - w_ref| / |w_ref| after the step, None where the optimizer's state has 8 bits.
        skipped: the layout skipped the step, and why.
    """

    step: int
    loss: float
    reference_loss: float
    grad_norm: float
    reference_grad_norm: float
    gradient: float
    worst: str
    worst_gradient: float
    weight: float | None
    skipped: str = ""

    def agrees(self, tolerance: float) -> bool:
        """Everything within `tolerance` (weights after Adam's square roots: ten times as much)."""
        scale = max(abs(self.reference_loss), 1e-30)
        norm = max(abs(self.reference_grad_norm), 1e-30)
        checks = [
            abs(self.loss - self.reference_loss) / scale,
            abs(self.grad_norm - self.reference_grad_norm) / norm,
            self.gradient,
        ]
        weights_agree = self.weight is None or self.weight <= 10 * tolerance
        return not self.skipped and all(c <= tolerance for c in checks) and weights_agree


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The answer: every step's difference and whether all agree."""

    layout: Layout
    precision: str
    tolerance: float
    steps: tuple[StepDifference, ...]

    @property
    def agrees(self) -> bool:
        """The layout computes what one process does."""
        return all(s.agrees(self.tolerance) for s in self.steps)

    def reason(self) -> str:
        """What differs first, in words."""
        bad = next((s for s in self.steps if not s.agrees(self.tolerance)), None)
        if bad is None:
            return "every step agrees"
        if bad.skipped:
            return f"step {bad.step} was skipped: {bad.skipped}"
        if not bad.reference_loss:
            return f"step {bad.step} has no loss to compare"
        ratio = bad.loss / bad.reference_loss
        return (
            f"step {bad.step}: loss {bad.loss:.6g} against {bad.reference_loss:.6g} ({ratio:.4f} times), gradients "
            f"differ by {bad.gradient:.2e} (allowed {self.tolerance:.0e}), most in {bad.worst}"
        )

    def to_json(self) -> dict[str, Any]:
        """``{"agrees", "reason", "layout", "precision", "tolerance", "steps"}``."""
        return {
            "agrees": self.agrees, "reason": self.reason(), "layout": self.layout.to_dict(),
            "precision": self.precision, "tolerance": self.tolerance, "steps": [asdict(s) for s in self.steps],
        }  # fmt: skip


def verify(
    plan: PlanFile | str | PathLike[str], *, layout: Layout | None = None, steps: int = 2, seq_len: int | None = None,
    layers: int | None = None, seed: int = 0, as_planned: bool = False, tolerance: float | None = None,
    lr: float = 1e-3, threads: int | None = 1,
) -> Verification:  # fmt: skip
    """Run the plan's layout on local CPU ranks and, beside it, one plain process; compare.

    Args:
        plan: a plan file, read or not.
        layout: instead of the plan's.
        steps: optimizer steps. seq_len: tokens a sequence (the plan's, at most 64, where None).
        layers: of a shorter model: layers are alike.
        as_planned: keep the plan's precision; fp32 elsewhere, where a difference is a mistake and no rounding.
        tolerance: relative difference of gradients; by the compute dtype where None.

    Raises:
        InvalidInput: no steps, more ranks than this machine should start, or a layout the runtime does not run.
    """
    plan = plan if isinstance(plan, PlanFile) else PlanFile.load(plan)
    wanted = layout or plan.layout
    if not as_planned:
        wanted = replace(wanted, precision="fp32")
    _check(wanted, steps)
    if seq_len is not None:
        whole("--seq", seq_len)
    if tolerance is not None:
        real("--tolerance", tolerance, above=0)
    real("lr", lr, above=0)
    compute = Precision.named(wanted.precision).compute
    config = None if plan.config is None else _short(dict(plan.config), layers)
    payload = {
        "config": config, "factory": plan.factory, "layout": wanted.to_dict(), "steps": steps, "seed": seed, "lr": lr,
        "seq_len": seq_len or min(plan.workload.seq_len, 64), "optimizer": plan.workload.optimizer,
    }  # fmt: skip
    results = run_ranks(
        "loadmaster.runtime.verify_rank:verify_rank", payload, world_size=wanted.world_size, threads=threads
    )
    return Verification(
        layout=wanted, precision=wanted.precision, tolerance=tolerance or TOLERANCES.get(compute, 2e-5),
        steps=tuple(StepDifference(**row) for row in results[0]),
    )  # fmt: skip


def _check(layout: Layout, steps: int) -> None:
    whole("--steps", steps)
    for axis in ("tp", "pp", "cp", "ep"):
        if getattr(layout, axis) != 1:
            raise InvalidInput(
                f"layout.{axis}", getattr(layout, axis), "is planned and priced but not run by this runtime",
                f"verify the data axes alone with --layout {axis}=1",
            )  # fmt: skip
    if layout.world_size > MAX_LOCAL_RANKS:
        raise InvalidInput(
            "layout", layout.describe(), f"has {layout.world_size} ranks; {MAX_LOCAL_RANKS} are started here at most",
            "the same mechanisms run with fewer: --layout dp_shard=4",
        )  # fmt: skip


def _short(config: dict[str, Any], layers: int | None) -> dict[str, Any]:
    from loadmaster.runtime.audit_plan import short_config

    return short_config(config, layers)
