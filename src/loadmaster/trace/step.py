"""The step that is traced: forward, loss, backward, optimizer, and once more with the optimizer's state in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loadmaster.errors import InvalidInput
from loadmaster.trace.saved import saved_tensors_watched
from loadmaster.trace.timeline import Category
from loadmaster.trace.tracer import Tracer

__all__ = ["OPTIMIZERS", "StepPlan", "autocast", "default_loss", "mark", "run_steps"]

OPTIMIZERS: dict[str, Callable[[Any, bool], torch.optim.Optimizer]] = {
    "adamw": lambda p, foreach: torch.optim.AdamW(p, lr=1e-4, foreach=foreach),
    "adam": lambda p, foreach: torch.optim.Adam(p, lr=1e-4, foreach=foreach),
    "sgd": lambda p, foreach: torch.optim.SGD(p, lr=1e-4, foreach=foreach),
    "sgd_momentum": lambda p, foreach: torch.optim.SGD(p, lr=1e-4, momentum=0.9, foreach=foreach),
    "adagrad": lambda p, foreach: torch.optim.Adagrad(p, lr=1e-4, foreach=foreach),
    "adamw_fused": lambda p, _: torch.optim.AdamW(p, lr=1e-4, fused=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What a traced step consists of.

    Attributes:
        optimizer: a name of `OPTIMIZERS`, a function of the parameters, or None for no update.
        foreach: update all parameters at once, with temporaries as large as they are.
        loss: scalar of the module's output.
        autocast: dtype of autocast, None without it.
        clip: clip the gradient norm; steps: how many.
    """

    optimizer: str | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = "adamw"
    foreach: bool = True
    loss: Callable[[Any], torch.Tensor] | None = None
    autocast: torch.dtype | None = None
    clip: float | None = None
    steps: int = 2

    def build_optimizer(self, module: nn.Module) -> torch.optim.Optimizer | None:
        """The optimizer over the trainable parameters.

        Raises:
            InvalidInput: unknown name, or nothing to train.
        """
        if self.optimizer is None:
            return None
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            raise InvalidInput("module", type(module).__name__, "has no trainable parameter", "unfreeze one")
        if callable(self.optimizer):
            return self.optimizer(parameters)
        if self.optimizer not in OPTIMIZERS:
            raise InvalidInput("optimizer", self.optimizer, "is not known", f"use one of {', '.join(OPTIMIZERS)}")
        return OPTIMIZERS[self.optimizer](parameters, self.foreach)


def default_loss(output: Any) -> torch.Tensor:
    """The module's own ``loss`` (Hugging Face), a scalar output as it is, or the mean of its first tensor.

    Raises:
        InvalidInput: no tensor that requires a gradient comes out.
    """
    loss = output.get("loss") if hasattr(output, "get") else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    tensor = _first_tensor(output)
    if tensor is None:
        raise InvalidInput(
            "loss", type(output).__name__, "holds no tensor that requires a gradient", "give loss=, a function of it"
        )
    return tensor if tensor.ndim == 0 else tensor.mean()


def _first_tensor(tree: Any) -> torch.Tensor | None:
    if isinstance(tree, torch.Tensor):
        return tree if tree.requires_grad else None
    items = tree.values() if hasattr(tree, "values") else tree if isinstance(tree, list | tuple) else ()
    return next((t for t in map(_first_tensor, items) if t is not None), None)


def mark(tracer: Tracer, tensors: Iterable[tuple[str, torch.Tensor]], category: Category, term: str) -> None:
    """Name the storages under `tensors`, following those not followed yet; a name is a path below its module."""
    for name, tensor in tensors:
        for local in _locals(tensor):
            life = tracer.follow(local)
            if life.category in (Category.TEMPORARY, Category.ACTIVATION, Category.COMMUNICATION):
                life.category, life.term, life.name = category, term, name
                life.owner = name.rpartition(".")[0]


def _locals(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the data: the local shard of a DTensor."""
    inner = getattr(tensor, "_local_tensor", None)
    return [inner if inner is not None else tensor]


Window = Callable[[Tracer, tuple[Any, ...], dict[str, Any], str], None]


def run_steps(
    tracer: Tracer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: StepPlan, *,
    window: Window | None = None,
) -> None:  # fmt: skip
    """Run `plan` on the tracer; `window` runs a step's forwards and backwards where they are not one of each."""
    where = tracer.where
    with where.during("setup"):
        mark(tracer, module.named_parameters(), Category.PARAMETER, "parameters")
        mark(tracer, module.named_buffers(), Category.BUFFER, "buffers/model")
        optimizer = plan.build_optimizer(module)
    for step in range(plan.steps):
        suffix = "" if step == 0 else f" {step + 1}"
        if window is not None:
            window(tracer, args, kwargs, suffix)
        else:
            _forward_backward(tracer, module, args, kwargs, plan, suffix)
        gradients = [(n, p.grad) for n, p in module.named_parameters() if p.grad is not None]
        mark(tracer, gradients, Category.GRADIENT, "gradients")
        del gradients
        _update(tracer, module, plan, optimizer, suffix)


def _forward_backward(
    tracer: Tracer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: StepPlan, suffix: str
) -> None:
    where = tracer.where
    with where.during("forward" + suffix), saved_tensors_watched(tracer), autocast(plan.autocast):
        loss = (plan.loss or default_loss)(module(*args, **kwargs))
    with where.during("backward" + suffix, backward=True), saved_tensors_watched(tracer):
        loss.backward()  # type: ignore[no-untyped-call]


def _update(
    tracer: Tracer, module: nn.Module, plan: StepPlan, optimizer: torch.optim.Optimizer | None, suffix: str
) -> None:
    where = tracer.where
    with where.during("optimizer" + suffix):
        if plan.clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), plan.clip)
        if optimizer is not None:
            optimizer.step()
            _mark_state(tracer, module, optimizer)
    with where.during("zero_grad" + suffix):
        if optimizer is not None:
            optimizer.zero_grad()
        else:
            module.zero_grad()


def _mark_state(tracer: Tracer, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    names = {id(p): name for name, p in module.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, item in state.items():
            if isinstance(item, torch.Tensor):
                name = f"{names.get(id(parameter), '')} {key}"
                mark(tracer, [(name, item)], Category.OPTIMIZER, f"optimizer/{key}")


@contextmanager
def autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """torch.autocast to `dtype`, or nothing."""
    with nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype):
        yield
