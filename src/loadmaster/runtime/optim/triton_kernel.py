"""The fused CUDA kernel in Triton: one program a block; runs on the CPU too, in Triton's interpreter."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from loadmaster.program.codebook import FIRST_MOMENT, SECOND_MOMENT, num_blocks
from loadmaster.runtime.optim.rules import Rule
from loadmaster.runtime.optim.work import Work

__all__ = ["NAME", "available", "step", "supports"]

NAME = "Triton"
SIGNED_OFFSET, UNSIGNED_OFFSET = FIRST_MOMENT.offset, SECOND_MOMENT.offset
SIGNED_TOP, UNSIGNED_TOP = float(FIRST_MOMENT.curve(127)), float(SECOND_MOMENT.curve(255))
SIGNED_UNIT = 1.0 / FIRST_MOMENT.unit


def available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def supports(work: Work) -> bool:
    """Floating tensors on CUDA, or anywhere under the interpreter."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (work.param.device.type == "cuda" or interpreted) and work.param.dtype in (
        torch.float32, torch.bfloat16, torch.float16,
    )  # fmt: skip


def step(works: Sequence[Work]) -> None:
    """One launch a tensor, and nothing copied back: a CUDA graph can hold it."""
    for work in works:
        _launch(work)


def _launch(work: Work) -> None:
    device = work.param.device
    row = work.scalars.row()
    if any(isinstance(x, Tensor) for x in row):
        scalars = torch.stack([torch.as_tensor(x, dtype=torch.float32, device=device) for x in row])
    else:
        scalars = torch.tensor(row, dtype=torch.float32).to(device, non_blocking=True)
    captured = work.step.device.type != "cpu" or any(isinstance(x, Tensor) for x in row)
    empty = torch.empty(0, device=device)
    first = second = (empty, empty)
    for moment in work.moments:
        pair = (moment.data, empty if moment.scales is None else moment.scales)
        if work.rule is Rule.ADAGRAD or (work.rule is Rule.ADAM and moment is work.moments[1]):
            second = pair
        else:
            first = pair
    _kernel()[(num_blocks(work.param.numel(), work.block),)](
        work.param, work.grad, *first, *second, scalars, work.step.to(device) if captured else scalars,
        work.param.numel(), work.start // work.block, _signed(work.seed), _signed(work.key),
        **constants(
            rule=int(work.rule), block=work.block, coded=work.moments[0].scales is not None, nesterov=work.nesterov,
            stochastic=work.stochastic, bf16=work.param.dtype is torch.bfloat16, captured=captured,
        ),
    )  # fmt: skip


def constants(
    *, rule: int, block: int, coded: bool, nesterov: bool, stochastic: bool, bf16: bool, captured: bool
) -> dict[str, Any]:
    """What the kernel is compiled for, by the names of its arguments."""
    return {
        "RULE": rule, "BLOCK": block, "CODED": coded, "NESTEROV": nesterov, "STOCHASTIC": stochastic, "BF16": bf16,
        "CAPTURED": captured, "S_OFFSET": _signed(SIGNED_OFFSET), "U_OFFSET": _signed(UNSIGNED_OFFSET),
        "S_TOP": SIGNED_TOP, "U_TOP": UNSIGNED_TOP, "S_UNIT": SIGNED_UNIT, "U_HALF": UNSIGNED_OFFSET >> 2,
        "S_HALF": SIGNED_OFFSET >> 1,
    }  # fmt: skip


def _signed(x: int) -> int:
    """32 bits as the int32 a kernel takes."""
    return x - 2**32 if x >= 2**31 else x


_made: dict[bool, Any] = {}  # by whether it is interpreted


def _kernel() -> Any:
    """The kernel, compiled or interpreted, made when first needed: importing this file needs neither GPU nor Triton.

    Triton decides for the interpreter when it decorates, so a module that was decorated otherwise is loaded again.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted not in _made:
        module = importlib.import_module("loadmaster.runtime.optim.kernels.blockwise_triton")
        if ("Interpreted" in type(module.step_kernel).__name__) != interpreted:
            module = importlib.reload(module)
        _made[interpreted] = module.step_kernel
    return _made[interpreted]
