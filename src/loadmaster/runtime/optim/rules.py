"""The update rules on fp32 tensors, in plain PyTorch: each moves a weight and its moments in place."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from loadmaster.program.codebook import FIRST_MOMENT, SECOND_MOMENT, Code

__all__ = ["MOMENTS", "Rule", "Scalars", "apply"]

Number = float | Tensor


class Rule(IntEnum):
    """Numbers the kernels know the rules by."""

    ADAM = 0
    MOMENTUM = 1
    LION = 2
    ADAGRAD = 3


# (state name, code) of each rule's moments; the kernels take a signed first and an unsigned second
MOMENTS: dict[Rule, tuple[tuple[str, Code], ...]] = {
    Rule.ADAM: (("exp_avg", FIRST_MOMENT), ("exp_avg_sq", SECOND_MOMENT)),
    Rule.MOMENTUM: (("momentum_buffer", FIRST_MOMENT),),
    Rule.LION: (("exp_avg", FIRST_MOMENT),),
    Rule.ADAGRAD: (("sum", SECOND_MOMENT),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalars:
    """Numbers of one step; plain, or 0-dim tensors on the device where the step is captured in a graph.

    Attributes:
        beta1, beta2: decay of the moments; rest1, rest2: what a new gradient is weighted with.
        decay: the weight is multiplied with (decoupled decay); l2: times the weight is added to the gradient.
        step: length of the step; root: multiplies sqrt(v) (Adam's bias correction); eps: added to it.
        dithered: 1 to round lost moves stochastically, 0 to round always to the nearest code.
        grad_scale: multiplies the gradient first (unscaling, clipping; -1 to maximise).
    """

    beta1: Number = 0.0
    beta2: Number = 0.0
    rest1: Number = 1.0
    rest2: Number = 1.0
    decay: Number = 1.0
    l2: Number = 0.0
    step: Number = 0.0
    root: Number = 1.0
    eps: Number = 0.0
    dithered: Number = 1.0
    grad_scale: Number = 1.0

    def row(self) -> list[Number]:
        """Twelve numbers in the order the kernels read them."""
        return [
            self.beta1, self.beta2, self.rest1, self.rest2, self.decay, self.l2, self.step, self.root, self.eps,
            self.dithered, self.grad_scale, 0.0,
        ]  # fmt: skip


def apply(rule: Rule, p: Tensor, g: Tensor, moments: list[Tensor], s: Scalars, *, nesterov: bool = False) -> None:
    """One step of `rule` on flat fp32 tensors, in place.

    adam:      m = b1 m + r1 g;  v = b2 v + r2 g^2;  p = decay p - step m / (sqrt(v) root + eps)
    momentum:  m = b1 m + r1 g;  p = decay p - step (g + b1 m if nesterov else m)
    lion:      p = decay p - step sign(b1 m + r1 g);  m = b2 m + r2 g     (Chen et al. 2023, arXiv:2302.06675)
    adagrad:   v = v + g^2;      p = decay p - step g / (sqrt(v) + eps)
    """
    g = g * s.grad_scale
    if rule is not Rule.LION:
        g = g + s.l2 * p
    match rule:
        case Rule.ADAM:
            m, v = moments
            m.mul_(s.beta1).add_(s.rest1 * g)
            v.mul_(s.beta2).add_(s.rest2 * (g * g))
            direction = m / (v.sqrt() * s.root + s.eps)
        case Rule.MOMENTUM:
            (m,) = moments
            m.mul_(s.beta1).add_(s.rest1 * g)
            direction = g + s.beta1 * m if nesterov else m
        case Rule.LION:
            (m,) = moments
            direction = torch.sign(s.beta1 * m + s.rest1 * g)
            m.mul_(s.beta2).add_(s.rest2 * g)
        case Rule.ADAGRAD:
            (v,) = moments
            v.add_(g * g)
            direction = g / (v.sqrt() + s.eps)
    p.mul_(s.decay).sub_(s.step * direction)
