"""``lm.trace``: one training step of any module on ghosts, and where its memory went."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from loadmaster.describe.layout import Layout
from loadmaster.errors import InvalidInput, LoadmasterError
from loadmaster.trace.ghost import Ghost
from loadmaster.trace.recompute import recompute_blocks
from loadmaster.trace.step import StepPlan, mark, run_steps
from loadmaster.trace.timeline import TERMS, Category, Storage, Timeline
from loadmaster.trace.tracer import Life, Tracer, Untraceable
from loadmaster.trace.whereabouts import Whereabouts

__all__ = ["trace"]


class Survey(Protocol):
    """Whoever wants to look at a module before it is traced."""

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at it."""


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def trace(
    module: nn.Module | Callable[[], Any],
    inputs: Any = (),
    *,
    optimizer: str | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = "adamw",
    foreach: bool = True,
    loss: Callable[[Any], torch.Tensor] | None = None,
    precision: str = "fp32",
    recompute: str = "none",
    clip: float | None = None,
    steps: int = 2,
    real: bool = False,
    name: str = "",
    survey: Survey | None = None,
    layout: Layout | None = None,
    rank: int = 0,
    stage: int = 0,
    micro_batches: int | None = None,
) -> Timeline:
    """Trace `steps` training steps: forward, loss, backward, optimizer; no device, no data, no memory needed.

    Args:
        module: the module, or a function that builds it (then nothing is allocated at all); the function may return
            ``(module, inputs)``.
        inputs: a tensor, a tuple of positional or a mapping of keyword arguments, or a function that makes them.
        optimizer: ``adamw``, ``adam``, ``sgd``, ``sgd_momentum``, ``adagrad``, ``adamw_fused``, a function of the
            parameters, or None; foreach: PyTorch's default on a GPU; its temporaries are as large as the parameters.
        loss: a scalar of the module's output; by default its ``loss``, itself if scalar, or its first tensor's mean.
        precision: ``fp32``, ``bf16``, ``fp16`` (weights and all), or ``bf16-mixed``, ``fp16-mixed`` (autocast).
        recompute: ``none``, or ``full``: every repeated block under a non-reentrant checkpoint.
        clip: clip the gradient norm before the update; steps: 2 shows the step that has optimizer state.
        real: run on real tensors, for small modules whose path depends on data.
        name: what reports call it; by default the module's class.
        layout: trace one rank of it: dp_shard with zero=3 (fully_shard), dp_replicate, tp, a stage of pp; its precision
            and recompute are not read. rank: which; stage: of the pipeline; micro_batches: of a step (2 * pp).
        survey: is shown the module and its arguments before they run; FLOPs are then counted as well.

    Raises:
        Untraceable: something depends on data; the message names module and op.
        InvalidInput: a bad argument.

    >>> from torch import nn
    >>> step = trace(nn.Linear(16, 4), torch.zeros(2, 16), optimizer="sgd")
    >>> step.peak.by_category["parameter"], step.peak.event.phase
    (272, 'backward')
    """
    began = time.perf_counter()
    dtype, autocast = _precision(precision)
    plan = StepPlan(optimizer=optimizer, foreach=foreach, loss=loss, autocast=autocast, clip=clip, steps=steps)
    where = Whereabouts()
    tracer = Tracer(where, real=real)
    spread = _spread(layout, rank)
    notes: list[str] = []
    if layout is not None:
        plan = _for_layout(plan, layout, notes)
    with spread as mesh, tracer, where.listening():
        try:
            built, args, kwargs = _materialise(tracer, module, inputs, dtype)
            window = None
            if layout is not None and layout.pp > 1:
                from loadmaster.trace.pipeline import PipelineStage, cut_stage

                cut_stage(built, layout, stage, tracer, autocast or dtype)
                window = PipelineStage(built, layout, stage, micro_batches or 2 * layout.pp, plan).run
            where.name(built)
            recompute_blocks(built, recompute)
            if layout is not None:
                from loadmaster.trace.sharded import place

                place(built, layout, mesh, autocast)
            if survey is not None:
                survey.begin(built, args, kwargs)
                tracer.flops = {}
            run_steps(tracer, built, args, kwargs, plan, window=window)
        except LoadmasterError:
            raise
        except Exception as error:
            raise (tracer.refusal or _unknown(where, error)) from error
        if tracer.refusal is not None:  # the module's own code swallowed it
            raise tracer.refusal
    return _timeline(tracer, notes=tuple(notes), name=name or type(built).__name__, seconds=time.perf_counter() - began)


def _spread(layout: Layout | None, rank: int) -> AbstractContextManager[Any]:
    """The fake ranks of a layout; nothing without one."""
    if layout is None:
        return nullcontext()
    from loadmaster.trace.sharded import check_layout, fake_ranks  # torch.distributed takes a second to import

    check_layout(layout)
    return fake_ranks(layout, rank)


def _for_layout(plan: StepPlan, layout: Layout, notes: list[str]) -> StepPlan:
    """What a layout changes in the step."""
    if layout.zero == 3 and plan.autocast is not None:
        return replace(plan, autocast=None)  # fully_shard casts what it gathers
    if layout.tp > 1 and layout.zero != 3 and plan.foreach:
        notes.append(
            "the optimizer runs parameter by parameter: PyTorch's foreach refuses split and whole ones together"
        )
        return replace(plan, foreach=False)
    if layout.dp_replicate > 1 and layout.zero == 0:
        notes.append("the buckets in which replicas reduce their gradients are not traced")
    return plan


def _precision(name: str) -> tuple[torch.dtype, torch.dtype | None]:
    base = name.removesuffix("-mixed")
    if base not in DTYPES or (name != base and base not in ("bf16", "fp16")):
        known = ", ".join([*DTYPES, "bf16-mixed", "fp16-mixed"])
        raise InvalidInput("precision", name, "is not known to trace", f"use one of {known}")
    return (DTYPES[base], None) if name == base else (torch.float32, DTYPES[base])


def _materialise(
    tracer: Tracer, module: Any, inputs: Any, dtype: torch.dtype
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The module on ghosts, in its dtype, and its arguments."""
    if not isinstance(module, nn.Module):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            module = module()
        finally:
            torch.set_default_dtype(before)
        if isinstance(module, tuple):
            module, inputs = module
    if not isinstance(module, nn.Module):
        raise InvalidInput("module", type(module).__name__, "is no nn.Module", "return one from the factory")
    if not tracer.real:
        module = _ghostly(tracer, module)
    if any(p.is_floating_point() and p.dtype is not dtype for p in module.parameters()):
        module = module.to(dtype)
    module.train()
    args, kwargs = _arguments(inputs() if callable(inputs) else inputs)
    if not tracer.real:
        args, kwargs = tracer._all_ghosts(args), tracer._all_ghosts(kwargs)
    mark(tracer, [(n, t) for n, t in _named_tensors(args, kwargs)], Category.INPUT, "batch")
    return module, args, kwargs


def _ghostly(tracer: Tracer, module: nn.Module) -> nn.Module:
    """A copy of `module` whose parameters and buffers are ghosts; itself, if they already are."""
    owned = list(module.parameters()) + list(module.buffers())
    if all(isinstance(t, Ghost) for t in owned):
        return module
    memo: dict[int, Any] = {}
    for tensor in owned:
        if isinstance(tensor, Ghost):
            memo[id(tensor)] = tensor
            continue
        ghost: torch.Tensor = tracer.adopt(tensor, own=True)
        tracer.follow(ghost)
        if isinstance(tensor, nn.Parameter):
            ghost = nn.Parameter(ghost, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = ghost
    return copy.deepcopy(module, memo)


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}


def _named_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    named = [(f"input {i}", a) for i, a in enumerate(args)] + list(kwargs.items())
    return [(name, t) for name, t in named if isinstance(t, torch.Tensor)]


def _unknown(where: Whereabouts, error: Exception) -> Untraceable:
    """A failure of the module's own code, said in one line."""
    said = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
    _, phase, module, _, _ = where.log[-1]
    return Untraceable(f"module {module or '(root)'}, in {phase}: {what}; check the module and its inputs")


def _timeline(tracer: Tracer, *, name: str, seconds: float, notes: tuple[str, ...] = ()) -> Timeline:
    events = tracer.where.events()
    node_event = tracer.where.node_event

    def saver(life: Life) -> str:
        event = events[node_event[life.saved_by]] if life.saved_by in node_event else None
        return f"{event.module} ({event.op})".strip() if event is not None else ""

    storages = tuple(
        Storage(
            index=life.index, bytes=life.largest, dtype=str(life.dtype).removeprefix("torch."), shape=life.shape,
            category=life.category, term=life.term or _term(life, events[life.birth].phase), birth=life.birth,
            death=life.death, saved_from=life.saved_from, saved_until=life.saved_until,
            saved_by=saver(life) if life.saved_by is not None else "", name=life.name, owner=life.owner,
        )
        for life in tracer.lives
    )  # fmt: skip
    return Timeline(
        events=events, storages=storages, delta_event=np.array(tracer.delta_event, dtype=np.int64),
        delta_storage=np.array(tracer.delta_storage, dtype=np.int64),
        delta_bytes=np.array(tracer.delta_bytes, dtype=np.int64), phases=tuple(tracer.where.phases), name=name,
        notes=notes, flops=dict(tracer.flops or {}), seconds=seconds,
    )  # fmt: skip


def _term(life: Life, phase: str) -> str:
    if life.category is Category.TEMPORARY and phase.startswith("optimizer"):
        return "optimizer/temporaries"
    return TERMS[life.category]
