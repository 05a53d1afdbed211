"""Does this layout compute the same as one process? Judged on loss, gradient norm, gradients and weights, step by step.

The reference is plain PyTorch: one module, the whole global batch in one forward, one mean over its counted tokens,
one optimizer. The layout runs the engine on real ranks. Sequences ignore different numbers of tokens and the last
micro-batch is short, so that a mean of means, a sum not divided or a tensor counted twice shows. After each step the
reference goes on from the layout's weights: every step is judged by itself, and the rounding that Adam's first steps
blow up in near-zero gradients does not add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from os import PathLike
from typing import Any

from loadmaster.describe.layout import Layout
from loadmaster.describe.plan_file import PlanFile
from loadmaster.describe.precision import Precision
from loadmaster.errors import InvalidInput
from loadmaster.ranks import run_ranks

__all__ = ["StepDifference", "Verification", "verify", "verify_rank"]

# relative difference of gradients allowed: rounding in another order of summation, in the compute dtype
TOLERANCES = {"fp32": 2e-5, "tf32": 2e-2, "bf16": 5e-2, "fp16": 2e-2}
MAX_LOCAL_RANKS = 16
WEIGHT_DECAY = 0.01


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
    compute = Precision.named(wanted.precision).compute
    config = None if plan.config is None else _short(dict(plan.config), layers)
    payload = {
        "config": config, "factory": plan.factory, "layout": wanted.to_dict(), "steps": steps, "seed": seed, "lr": lr,
        "seq_len": seq_len or min(plan.workload.seq_len, 64), "optimizer": plan.workload.optimizer,
    }  # fmt: skip
    results = run_ranks("loadmaster.runtime.verify:verify_rank", payload, world_size=wanted.world_size, threads=threads)
    return Verification(
        layout=wanted, precision=wanted.precision, tolerance=tolerance or TOLERANCES.get(compute, 2e-5),
        steps=tuple(StepDifference(**row) for row in results[0]),
    )  # fmt: skip


def _check(layout: Layout, steps: int) -> None:
    if steps < 1:
        raise InvalidInput("--steps", steps, "must be at least 1", "use 2")
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


def verify_rank(payload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What every rank runs: the engine under the layout; rank 0 the reference as well. Rank 0 returns the rows."""
    import copy

    import torch

    from loadmaster.runtime.engine import build
    from loadmaster.runtime.launch import join_run
    from loadmaster.runtime.modules import build_module, vocab_size
    from loadmaster.runtime.optimizer import OptimizerConfig

    layout = Layout(**payload["layout"])
    with join_run(device="cpu") as member:
        module = build_module(config=payload["config"], factory=payload["factory"], seed=payload["seed"])
        without_dropout(module)
        vocabulary = min(vocab_size(module), 1 << 20)
        reference = _Reference(copy.deepcopy(module), layout, payload) if member.first else None
        optimizer = OptimizerConfig(
            name=payload["optimizer"], lr=payload["lr"], state_bits=layout.optimizer_bits, weight_decay=WEIGHT_DECAY
        )
        rows = []
        with build(module, layout, optimizer=optimizer, device=torch.device("cpu")) as engine:
            for step in range(payload["steps"]):
                items = _sequences(layout, payload["seq_len"], vocabulary, seed=payload["seed"] * 1000 + step)
                result = engine.step(_window(items, layout, member.rank))
                gradients = _gathered(engine.gradients(), "grad", member)
                weights = _gathered(engine.state(), "param", member)
                if reference is not None:
                    rows.append(reference.compare(step, items, result, gradients, weights))
        return rows


def without_dropout(module: Any) -> None:
    """Training mode for what depends on the batch, evaluation for the rest: masks differ from rank to rank."""
    from torch import nn

    module.train()
    for child in module.modules():
        if not isinstance(child, nn.modules.batchnorm._BatchNorm):
            child.training = False


def _sequences(layout: Layout, seq_len: int, vocabulary: int, *, seed: int) -> list[dict[str, Any]]:
    """Two micro-batches a rank, the last one short; each sequence ignores another number of tokens."""
    import torch

    count = max(layout.dp, 2 * layout.dp * layout.micro_batch_size - 1)
    made = torch.Generator().manual_seed(seed)
    items = []
    for _ in range(count):
        ids = torch.randint(0, vocabulary, (1, seq_len), generator=made)
        labels = ids.clone()
        labels[:, : int(torch.randint(0, max(1, seq_len - 2), (1,), generator=made))] = -100
        items.append({"input_ids": ids, "labels": labels})
    return items


def _window(items: list[dict[str, Any]], layout: Layout, rank: int) -> list[dict[str, Any]]:
    """This data rank's micro-batches of the global batch."""
    import torch

    low, high = (len(items) * r // layout.dp for r in (rank, rank + 1))
    mine, size = items[low:high], layout.micro_batch_size
    groups = (mine[i : i + size] for i in range(0, len(mine), size))
    return [{key: torch.cat([item[key] for item in group]) for key in group[0]} for group in groups]


def _gathered(shards: Any, kind: str, member: Any) -> dict[str, Any]:
    """Whole tensors of one kind, put together on rank 0 from all ranks' flat ranges."""
    import torch
    import torch.distributed as dist

    mine = [
        (s.name, tuple(s.full_shape), s.start, s.stop, s.tensor.detach().float().cpu().numpy().copy())
        for s in shards
        if s.kind == kind
    ]
    everyone: list[Any] | None = [None] * member.world_size if member.first else None
    dist.gather_object(mine, everyone, dst=0)
    whole: dict[str, Any] = {}
    for name, shape, start, stop, values in (row for rows in everyone or [] for row in rows):
        tensor = whole.setdefault(name, torch.zeros(shape))
        tensor.view(-1)[start:stop] = torch.from_numpy(values)
    return whole


def _plain_optimizer(name: str, parameters: list[Any], *, lr: float) -> Any:
    """PyTorch's own, or ours with 32-bit state where PyTorch has none (Lion)."""
    import torch

    from loadmaster.runtime import optim

    match name:
        case "sgd" | "sgd_momentum":
            momentum = 0.9 if name == "sgd_momentum" else 0.0
            return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=WEIGHT_DECAY)
        case "lion":
            return optim.Lion(parameters, lr=lr, betas=(0.9, 0.999), weight_decay=WEIGHT_DECAY)
    cls = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}[name]
    return cls(parameters, lr=lr, weight_decay=WEIGHT_DECAY)


class _Reference:
    """One process, plain PyTorch."""

    def __init__(self, module: Any, layout: Layout, payload: Mapping[str, Any]) -> None:
        self.module, self.eight_bit = module, layout.optimizer_bits == 8
        self.compute = Precision.named(layout.precision).compute
        trained = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = _plain_optimizer(payload["optimizer"], trained, lr=payload["lr"])

    def compare(
        self, step: int, items: list[dict[str, Any]], result: Any, gradients: Mapping[str, Any],
        weights: Mapping[str, Any],
    ) -> dict[str, Any]:  # fmt: skip
        """Take the same step, and set the layout's against it."""
        loss, norm = self._step(items)
        named = {n: p for n, p in self.module.named_parameters() if p.grad is not None and n in gradients}
        differences = {n: float((gradients[n].view_as(p) - p.grad).norm()) for n, p in named.items()}
        largest = max((float(p.grad.norm()) for p in named.values()), default=0.0)
        worst = max(differences, key=lambda n: differences[n], default="nothing")
        self.optimizer.step()
        weight = self._weight_difference(weights)
        self._continue_from(weights)
        return asdict(
            StepDifference(
                step=step, loss=result.loss, reference_loss=loss, grad_norm=result.grad_norm, reference_grad_norm=norm,
                gradient=_relative(math.hypot(*differences.values()), norm), worst=worst, skipped=result.reason,
                worst_gradient=_relative(differences.get(worst, 0.0), largest),
                weight=None if self.eight_bit else weight,
            )
        )  # fmt: skip

    def _step(self, items: list[dict[str, Any]]) -> tuple[float, float]:
        """The whole batch in one forward; loss and gradient norm."""
        import torch

        from loadmaster.runtime.loss import CausalLanguageModel

        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.compute)
        batch = {key: torch.cat([item[key] for item in items]) for key in items[0]}
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=half) if half else nullcontext():
            total, count = CausalLanguageModel()(self.module, batch)
        (total / count).backward()  # type: ignore[no-untyped-call]
        squares = (p.grad.double().square().sum() for p in self.module.parameters() if p.grad is not None)
        return float(total.detach() / count), math.sqrt(sum(float(s) for s in squares))

    def _continue_from(self, weights: Mapping[str, Any]) -> None:
        for name, parameter in self.module.named_parameters():
            if name in weights:
                parameter.data.copy_(weights[name].view_as(parameter))

    def _weight_difference(self, weights: Mapping[str, Any]) -> float:
        named = {n: p.detach() for n, p in self.module.named_parameters() if n in weights}
        apart = math.hypot(*(float((weights[n].view_as(p) - p).norm()) for n, p in named.items()))
        return _relative(apart, math.hypot(*(float(p.norm()) for p in named.values())))


def _relative(difference: float, size: float) -> float:
    return 0.0 if difference == 0 else difference / size if size else math.inf
