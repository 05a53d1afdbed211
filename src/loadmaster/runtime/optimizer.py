"""Which optimizer to run and the flat leaves it updates: any torch optimizer sees plain parameters with gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from loadmaster.errors import InvalidInput
from loadmaster.program.codebook import looks_like_embedding
from loadmaster.program.shards import Range
from loadmaster.runtime import optim

__all__ = ["Leaf", "OptimizerConfig", "build_optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """What the engine builds its optimizer from.

    Attributes:
        name: ``adamw``, ``adam``, ``sgd``, ``sgd_momentum``, ``lion``, ``adagrad``; ignored where `factory` is given.
        lr, betas, eps, weight_decay: as usual.
        max_grad_norm: clip the global norm at it; None: no clipping.
        state_bits: 32, or 8 for blockwise 8-bit moments.
        groups: (name, parameter) to overrides of its group, e.g. ``{"weight_decay": 0.0}``.
        factory: (param groups) to any torch optimizer.
        ema_decay: keep an fp32 exponential average of the weights.
        options: passed on to the optimizer's class.
    """

    name: str = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float | None = None
    state_bits: int = 32
    groups: Callable[[str, Tensor], dict[str, Any]] | None = None
    factory: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None
    ema_decay: float | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise InvalidInput(
                "optimizer.max_grad_norm", self.max_grad_norm, "must be positive", "use None not to clip"
            )
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise InvalidInput("optimizer.ema_decay", self.ema_decay, "must be in [0, 1)", "use e.g. 0.999")


@dataclass(slots=True, kw_only=True, eq=False)
class Leaf:
    """What the optimizer updates: a range of one parameter.

    Attributes:
        range: which elements of the parameter; the whole of it at stage 0.
        full_shape: of the parameter.
        tensor: given to the optimizer: the parameter's own storage, or a master copy (dtype, device) of it.
        weights: the parameter's storage for that range.
        gradient: where the reduced gradient lies.
        ema: fp32 average, if kept.
    """

    range: Range
    full_shape: tuple[int, ...]
    tensor: Tensor
    weights: Tensor
    gradient: Tensor
    ema: Tensor | None = None

    @property
    def separate(self) -> bool:
        """It is a copy, to be written back after the update."""
        return self.tensor.data_ptr() != self.weights.data_ptr()

    def take_gradient(self) -> None:
        """Hand the gradient to the optimizer (converted where the leaf has another dtype or device)."""
        self.tensor.grad = self.gradient.to(device=self.tensor.device, dtype=self.tensor.dtype)

    def drop_gradient(self) -> None:
        """Let go of it."""
        self.tensor.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the updated master into the weights."""
        if self.separate:
            self.weights.copy_(self.tensor)


def make_leaf(
    range: Range, full_shape: tuple[int, ...], weights: Tensor, gradient: Tensor, *,
    master: torch.dtype | None, offload: bool,
) -> Leaf:  # fmt: skip
    """A leaf on `weights`, or on a master copy of them where a wider dtype or the host is asked for."""
    device = torch.device("cpu") if offload else weights.device
    if master is not None and master != weights.dtype:
        tensor = weights.detach().to(device=device, dtype=master)
    elif offload:
        tensor = weights.detach().to(device=device, copy=True)
    else:
        tensor = weights.detach()
    return Leaf(
        range=range, full_shape=full_shape, tensor=tensor.requires_grad_(True), weights=weights, gradient=gradient
    )


def scales_in_step(optimizer: torch.optim.Optimizer, leaves: Sequence[Leaf]) -> bool:
    """Whether the optimizer's own kernel can scale the gradients while it reads them, and leaves them scaled.

    PyTorch's fused optimizers do (it is how GradScaler spares a pass), where a leaf's gradient is no converted copy.
    """
    fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return fused and all(
        leaf.tensor.dtype == leaf.gradient.dtype and leaf.tensor.device == leaf.gradient.device for leaf in leaves
    )


@contextlib.contextmanager
def step_scale(optimizer: Any, factor: float, device: torch.device) -> Iterator[None]:
    """Let the step inside multiply its gradients by `factor`."""
    if factor == 1.0:
        yield
        return
    optimizer.grad_scale = torch.tensor(1.0 / factor, dtype=torch.float32, device=device)  # the kernel divides
    optimizer.found_inf = torch.zeros((), dtype=torch.float32, device=device)
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def build_optimizer(
    config: OptimizerConfig, leaves: Sequence[Leaf], named: dict[str, Tensor], *, stochastic: bool = False
) -> torch.optim.Optimizer:
    """The optimizer over `leaves`, in groups of equal overrides; `stochastic`: how it rounds bf16 weights."""
    groups: list[dict[str, Any]] = []
    for leaf in leaves:
        overrides = config.groups(leaf.range.name, named[leaf.range.name]) if config.groups else {}
        for group in groups:
            if {k: v for k, v in group.items() if k != "params"} == overrides:
                group["params"].append(leaf.tensor)
                break
        else:
            groups.append({"params": [leaf.tensor], **overrides})
    if not groups:
        groups = [{"params": [torch.zeros(0, requires_grad=True)]}]  # a rank may own nothing but padding
    if config.factory is not None:
        return config.factory(groups)
    if config.state_bits == 8 or config.name == "lion" or stochastic:
        return _blockwise(config, groups, leaves, stochastic=stochastic)
    return _named_optimizer(config, groups)


def _named_optimizer(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, **config.options}
    match config.name:
        case "adamw" | "adam":
            cls = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
            return cls(groups, betas=config.betas, eps=config.eps, **{"fused": True, **common})
        case "sgd":
            return torch.optim.SGD(groups, **common)
        case "sgd_momentum":
            return torch.optim.SGD(groups, momentum=config.betas[0], **common)
        case "adagrad":
            return torch.optim.Adagrad(groups, eps=config.eps, **common)
        case _:
            raise InvalidInput(
                "optimizer.name",
                config.name,
                "is not built in",
                "use adamw, adam, sgd, sgd_momentum, lion, adagrad or factory",
            )


def _blockwise(
    config: OptimizerConfig, groups: list[dict[str, Any]], leaves: Sequence[Leaf], *, stochastic: bool
) -> torch.optim.Optimizer:
    """Ours, whose state is coded by the whole parameter's size and role, whatever part of it a leaf is."""
    shards = {
        leaf.tensor: optim.ParameterShard(
            name=leaf.range.name, full_shape=leaf.full_shape, start=leaf.range.start, stop=leaf.range.stop,
            is_embedding=looks_like_embedding(leaf.range.name),
        )
        for leaf in leaves
    }  # fmt: skip
    common: dict[str, Any] = {
        "lr": config.lr, "weight_decay": config.weight_decay, "state_bits": config.state_bits, "shards": shards,
        "stochastic_rounding": stochastic, **config.options,
    }  # fmt: skip
    match config.name:
        case "adamw" | "adam":
            cls = optim.AdamW if config.name == "adamw" else optim.Adam
            return cls(groups, betas=config.betas, eps=config.eps, **common)
        case "sgd_momentum":
            return optim.SGD(groups, momentum=config.betas[0], **common)
        case "lion":
            return optim.Lion(groups, betas=config.betas, **common)
        case "adagrad":
            return optim.Adagrad(groups, eps=config.eps, **common)
        case _:
            raise InvalidInput(
                "optimizer.name", config.name, "has no 8-bit state and no stochastic rounding",
                "use adamw, adam, sgd_momentum, lion or adagrad, or optimizer_bits=32 and another precision",
            )  # fmt: skip
