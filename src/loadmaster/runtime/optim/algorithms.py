"""AdamW, Adam, SGD with momentum, Lion and Adagrad, each with 32- or 8-bit state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loadmaster.errors import InvalidInput
from loadmaster.runtime.optim.optimizer import Blockwise, Params
from loadmaster.runtime.optim.rules import Rule, Scalars

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion"]

Rate = float | Tensor


def _check(**values: Any) -> None:
    for field, value in values.items():
        pair = value if isinstance(value, tuple) else (value,)
        low, high = (0.0, 1.0) if field in ("betas", "momentum") else (0.0, float("inf"))
        for number in pair:
            if not low <= float(number) < high:
                raise InvalidInput(f"optimizer.{field}", value, f"must be at least 0 and below {high:g}", "check it")


class Adam(Blockwise):
    """Adam (Kingma and Ba 2015, arXiv:1412.6980); weight decay is added to the gradient.

    >>> layer = torch.nn.Linear(64, 64)
    >>> optimizer = Adam(layer, lr=1e-3, state_bits=8)
    >>> layer(torch.ones(1, 64)).sum().backward(); optimizer.step()
    >>> optimizer.state[layer.weight]["exp_avg"].dtype, optimizer.state[layer.bias]["exp_avg"].dtype
    (torch.int8, torch.float32)
    """

    rule = Rule.ADAM
    decoupled = False

    def __init__(
        self,
        params: Params,
        lr: Rate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        _check(lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, **options)

    def scalars(self, group: dict[str, Any], step: float | Tensor) -> Scalars:
        """step = lr / (1 - b1^t), root = 1 / sqrt(1 - b2^t)."""
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        return Scalars(
            beta1=beta1, beta2=beta2, rest1=1 - beta1, rest2=1 - beta2, eps=group["eps"],
            step=lr / (1 - beta1**step), root=(1 - beta2**step) ** -0.5,
            decay=1 - lr * decay if self.decoupled else 1.0, l2=0.0 if self.decoupled else decay,
        )  # fmt: skip


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    decoupled = True

    def __init__(
        self,
        params: Params,
        lr: Rate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, **options)


class SGD(Blockwise):
    """SGD with momentum, as PyTorch defines it; without momentum there is no state, and torch.optim.SGD does it."""

    rule = Rule.MOMENTUM

    def __init__(
        self,
        params: Params,
        lr: Rate = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        _check(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if momentum == 0:
            raise InvalidInput("optimizer.momentum", 0, "leaves no state to code", "use torch.optim.SGD")
        if nesterov and dampening:
            raise InvalidInput("optimizer.dampening", dampening, "must be 0 with nesterov", "drop one of them")
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults, **options)

    def scalars(self, group: dict[str, Any], step: float | Tensor) -> Scalars:
        """The first step takes the gradient whole, as PyTorch does."""
        rest = 1 - group["dampening"]
        first = torch.where(step == 1, 1.0, rest) if isinstance(step, Tensor) else (1.0 if step == 1 else rest)
        return Scalars(beta1=group["momentum"], rest1=first, step=group["lr"], l2=group["weight_decay"])


class Lion(Blockwise):
    """Lion (Chen et al. 2023, arXiv:2302.06675): the sign of an interpolated momentum, decoupled decay."""

    rule = Rule.LION

    def __init__(
        self,
        params: Params,
        lr: Rate = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        _check(lr=lr, betas=tuple(betas), weight_decay=weight_decay)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, **options)

    def scalars(self, group: dict[str, Any], step: float | Tensor) -> Scalars:
        """Nothing depends on the step."""
        (beta1, beta2), lr = group["betas"], group["lr"]
        decay = 1 - lr * group["weight_decay"]
        return Scalars(beta1=beta1, beta2=beta2, rest1=1 - beta1, rest2=1 - beta2, step=lr, decay=decay)


class Adagrad(Blockwise):
    """Adagrad (Duchi et al. 2011); the sum of squares only grows, which stochastic rounding alone can follow."""

    rule = Rule.ADAGRAD

    def __init__(
        self,
        params: Params,
        lr: Rate = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        _check(lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps)
        defaults = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps, "maximize": maximize}
        super().__init__(params, defaults, **options)

    def scalars(self, group: dict[str, Any], step: float | Tensor) -> Scalars:
        """step = lr / (1 + (t - 1) lr_decay)."""
        rate = group["lr"] / (1 + (step - 1) * group["lr_decay"])
        return Scalars(step=rate, l2=group["weight_decay"], eps=group["eps"])
