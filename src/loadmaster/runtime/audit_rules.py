"""From what the audited steps showed to findings: each rule names the measurement, what follows and the way out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from loadmaster.describe.dtype import DType
from loadmaster.describe.precision import Precision, Rounding
from loadmaster.runtime.audit import Finding, Measured, worst
from loadmaster.runtime.extremes import Exponents
from loadmaster.runtime.scaler import LossScaler

__all__ = ["find", "formats", "recommend", "summary"]

_ORDER = {"error": 0, "warning": 1, "note": 2}
FP16 = DType.named("fp16")
LOST_TOO_MUCH = 0.01  # share of updates lost from which a run visibly stalls against fp32 weights
HEADROOM = 8.0  # activations this close to the limit will pass it as training goes on


def find(
    measured: Measured, precision: Precision, optimizer: torch.optim.Optimizer, *, init_scale: float
) -> tuple[Finding, ...]:
    """Every finding, errors first."""
    rules = (
        _activations(measured, precision),
        _gradients(measured, precision, init_scale),
        _updates(measured, precision),
        _epsilon(precision, optimizer),
        _structure(measured),
        _checkpoints(measured),
        _positions(measured, precision),
    )
    return tuple(sorted((f for rule in rules for f in rule), key=lambda f: _ORDER[f.severity]))


def merged(parts: Mapping[str, Exponents]) -> Exponents:
    """All of them together."""
    total = Exponents()
    for part in parts.values():
        total.merge(part)
    return total


def _activations(measured: Measured, precision: Precision) -> Iterator[Finding]:
    over = {n: e for n, e in measured.outputs.items() if FP16.overflows(e.largest)}
    near = {n: e for n, e in measured.outputs.items() if e.largest * HEADROOM > FP16.max and n not in over}
    planned = precision.compute == "fp16"
    if over:
        top = worst(over)
        yield Finding(
            code="activation_overflow", severity="error" if planned else "warning", where=top,
            message=f"activations reach {over[top[0]].largest:.6g} in {top[0]}; fp16 ends at {FP16.max:.0f}, so they "
            "become inf and the next norm makes NaN of them. This is no loss-scale problem: scaling acts on "
            "gradients, not on activations",
            way_out="use bf16, or keep these layers in fp32",
            figures={"largest": over[top[0]].largest, "limit": FP16.max},
        )  # fmt: skip
    elif near and planned:
        top = worst(near)
        yield Finding(
            code="activation_near_overflow", severity="warning", where=top,
            message=f"activations reach {near[top[0]].largest:.6g} in {top[0]}, a factor of "
            f"{FP16.max / near[top[0]].largest:.1f} below fp16's end, and they grow in training",
            way_out="prefer bf16, or watch this layer",
            figures={"largest": near[top[0]].largest, "limit": FP16.max},
        )  # fmt: skip


def _gradients(measured: Measured, precision: Precision, init_scale: float) -> Iterator[Finding]:
    """What zero and infinity take of the gradients, without a scale and with one."""
    everything = merged(
        {**measured.output_gradients, **{f"{n} (grad)": e for n, e in measured.parameter_gradients.items()}}
    )
    if not everything.total or "fp16" not in (precision.compute, precision.grad):
        return
    unscaled = everything.share_lost(FP16)
    start = _scale_start(everything.largest, init_scale)
    settled = everything.share_lost(FP16, scale=start.settles_at)
    figures = {
        "largest": everything.largest, "lost_unscaled": unscaled, "lost_at_scale": settled,
        "scale": start.settles_at, "skips": float(start.skips),
    }  # fmt: skip
    if not precision.loss_scaling and unscaled > 0:
        yield Finding(
            code="gradient_underflow", severity="error", figures=figures,
            message=f"{unscaled:.1%} of the nonzero gradients become 0 in fp16 without loss scaling",
            way_out=f"scale the loss (2^{int(math.log2(start.settles_at))} leaves {settled:.2%}), or use bf16",
        )  # fmt: skip
    if precision.loss_scaling:
        yield Finding(
            code="scaled_gradients", severity="warning" if settled > LOST_TOO_MUCH else "note", figures=figures,
            message=f"at the scale 2^{math.log2(start.settles_at):.0f} that fits the largest gradient "
            f"({everything.largest:.3g}), {settled:.2%} of the gradients become 0 (unscaled: {unscaled:.1%})",
            way_out="use bf16 if that is too many" if settled > LOST_TOO_MUCH else "nothing to do",
        )  # fmt: skip
        if start.skips:
            yield Finding(
                code="skipped_steps", severity="note", figures=figures,
                message=f"from an initial scale of {init_scale:g} about {start.skips} steps are skipped until the "
                f"scale fits, at {start.settles_at:g}; a benign start-up",
                way_out=f"start at {start.settles_at:g} to lose none",
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Start:
    """Steps skipped until a scale fits, and that scale."""

    skips: int
    settles_at: float


def _scale_start(largest: float, init_scale: float) -> _Start:
    """The scaler that trains, fed with overflows until the largest gradient fits."""
    scaler, skips = LossScaler(scale=init_scale), 0
    while FP16.overflows(largest * scaler.scale) and scaler.scale > scaler.smallest:
        scaler.update(overflow=True)
        skips += 1
    return _Start(skips, scaler.scale)


def _updates(measured: Measured, precision: Precision) -> Iterator[Finding]:
    for dtype in ("bf16", "fp16"):
        share = measured.lost_share(dtype)
        exposed = precision.param == dtype and precision.master is None and precision.rounding is Rounding.NEAREST
        if not exposed and not (dtype == "bf16" and share > LOST_TOO_MUCH):
            continue
        rows = measured.updates
        top = sorted((n for n in rows if rows[n]["all"]), key=lambda n: -rows[n][dtype] / rows[n]["all"])[:5]
        severity = "note" if not exposed else "error" if share > LOST_TOO_MUCH else "note"
        would = "are" if exposed else "would be"
        yield Finding(
            code="lost_updates", severity=severity, where=tuple(top), figures={"share": share},
            message=f"{share:.1%} of the updates {would} lost with weights kept in {dtype} alone: they are smaller "
            "than half the spacing of the stored numbers",
            way_out="keep fp32 master weights, or round stochastically" if exposed else "keep the fp32 master weights",
        )  # fmt: skip


def _epsilon(precision: Precision, optimizer: torch.optim.Optimizer) -> Iterator[Finding]:
    """An epsilon that is 0 in the moments' format divides 0 by 0."""
    found: dict[str, float] = {}
    for group in optimizer.param_groups:
        eps = group.get("eps")
        halves = any(p.dtype == torch.float16 for p in group["params"])
        planned = precision.moment == "fp16" or (precision.param == "fp16" and precision.master is None)
        if isinstance(eps, float) and (halves or planned) and FP16.underflows(eps):
            found["fp16"] = eps
    if found:
        eps = found["fp16"]
        yield Finding(
            code="epsilon_underflow", severity="error",
            message=f"eps = {eps:g} is 0 in fp16 (its smallest number is {FP16.smallest_subnormal:.2g}), and so is the "
            f"square of every gradient below {math.sqrt(FP16.smallest_subnormal):.2g}: the update divides by 0",
            way_out="keep fp32 master weights and moments; a larger eps hides it and changes the optimizer",
            figures={"eps": eps, "smallest": FP16.smallest_subnormal},
        )  # fmt: skip


def _structure(measured: Measured) -> Iterator[Finding]:
    if measured.no_gradient:
        names = measured.no_gradient
        yield Finding(
            code="no_gradient", severity="error", where=names,
            message=f"{len(names)} trainable parameters get no gradient: {', '.join(names[:3])}"
            + (", ..." if len(names) > 3 else ""),
            way_out="freeze them, or find what cuts the graph (a re-entrant checkpoint with frozen inputs, a detach)",
        )  # fmt: skip
    if measured.batch_dependent:
        yield Finding(
            code="batch_dependent", severity="warning", where=measured.batch_dependent[:5],
            message=f"{len(measured.batch_dependent)} layers normalise over the micro-batch: results change with its "
            "size, with accumulation and with the number of data ranks",
            way_out="use group or layer norm, freeze their statistics, or keep the micro-batch size fixed",
        )  # fmt: skip


def _checkpoints(measured: Measured) -> Iterator[Finding]:
    if measured.checkpoints.random_not_kept:
        yield Finding(
            code="random_state_not_kept", severity="error",
            message=f"{measured.checkpoints.random_not_kept} checkpoints draw random numbers (dropout) with "
            "preserve_rng_state=False: the backward recomputes with other masks than the forward had",
            way_out="leave preserve_rng_state at True",
            figures={"checkpoints": float(measured.checkpoints.random_not_kept)},
        )  # fmt: skip
    if measured.checkpoints.cut_off:
        yield Finding(
            code="reentrant_checkpoint_cut_off", severity="error",
            message=f"{measured.checkpoints.cut_off} re-entrant checkpoints have no input that requires a gradient: "
            "nothing inside them is trained",
            way_out="use the non-reentrant form, use_reentrant=False",
            figures={"checkpoints": float(measured.checkpoints.cut_off)},
        )  # fmt: skip


def _positions(measured: Measured, precision: Precision) -> Iterator[Finding]:
    if not measured.half_positions:
        return
    distinct = {d: DType.named(d).num_distinct(max(measured.seq_len, 1)) for d in ("bf16", "fp16")}
    yield Finding(
        code="positions_in_half_precision", severity="error", where=measured.half_positions[:5],
        message=f"rotary frequencies are kept in half precision; of {measured.seq_len} positions bf16 tells "
        f"{distinct['bf16']} apart, fp16 {distinct['fp16']}",
        way_out="build indices, frequencies and angles in fp32 and cast only their cosines and sines",
        figures={k: float(v) for k, v in distinct.items()},
    )  # fmt: skip


def recommend(measured: Measured, precision: Precision, findings: tuple[Finding, ...]) -> str:
    """One sentence: which half precision, and what must stay in fp32."""
    codes = {f.code for f in findings}
    lost = measured.lost_share("bf16")
    if "activation_overflow" in codes:
        return "bf16: some activations exceed fp16's range; keep fp32 master weights"
    keep = f"keep fp32 master weights ({lost:.1%} of the updates would be lost without)"
    if precision.compute == "fp16" and "gradient_underflow" in codes:
        return f"bf16, or fp16 with loss scaling; {keep}"
    if precision.compute == "fp16":
        return f"fp16 with dynamic loss scaling holds these steps, bf16 needs none; {keep}"
    return f"bf16 holds these steps; {keep}"


def formats(measured: Measured) -> dict[str, dict[str, float]]:
    """fp16 against bf16: what each would have lost of these steps."""
    outputs, gradients = merged(measured.outputs), merged(measured.output_gradients)
    gradients.merge(merged(measured.parameter_gradients))
    rows = {}
    for name in ("fp16", "bf16"):
        dtype = DType.named(name)
        scale = _scale_start(gradients.largest, 2.0**16).settles_at if name == "fp16" else 1.0
        rows[name] = {
            "largest_held": dtype.max,
            "activations_overflow": float(sum(dtype.overflows(e.largest) for e in measured.outputs.values())),
            "activations_lost": outputs.share_lost(dtype),
            "gradients_lost_unscaled": gradients.share_lost(dtype),
            "loss_scale": scale,
            "gradients_lost_scaled": gradients.share_lost(dtype, scale=scale),
            "updates_lost": measured.lost_share(name),
        }
    return rows


def summary(measured: Measured) -> dict[str, Any]:
    """The measured numbers, for programs."""
    gradients = merged(measured.output_gradients)
    parameters = merged(measured.parameter_gradients)
    return {
        "losses": measured.losses,
        "activation_largest": merged(measured.outputs).largest,
        "gradient_largest": max(gradients.largest, parameters.largest),
        "gradient_median": parameters.quantile(0.5),
        "formats": formats(measured),
        "no_gradient": list(measured.no_gradient),
        "batch_dependent": list(measured.batch_dependent),
        "checkpoints": measured.checkpoints.calls,
    }
