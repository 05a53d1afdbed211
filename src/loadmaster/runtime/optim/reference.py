"""The step in plain PyTorch, any device and dtype: slow, with temporaries, and the truth for the fused kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loadmaster.program.codebook import num_blocks
from loadmaster.runtime.optim.codes import _mix as mix_tensor
from loadmaster.runtime.optim.codes import decode, encode, turn_of, weyl
from loadmaster.runtime.optim.rules import MOMENTS, Rule, apply
from loadmaster.runtime.optim.work import Work

__all__ = ["NAME", "narrow", "step"]

NAME = "reference (PyTorch)"


def step(works: Sequence[Work]) -> None:
    """One step of every tensor."""
    for work in works:
        _step(work)


def _step(work: Work) -> None:
    p, g = work.param.float(), work.grad.reshape(-1).float()
    names = MOMENTS[work.rule]
    turns = turn_of(work.key, work.start // work.block, num_blocks(p.numel(), work.block), p.device)
    values = [
        m.data if m.scales is None else decode(m.data, m.scales, code, work.block)
        for m, (_, code) in zip(work.moments, names, strict=True)
    ]
    if work.rule is Rule.ADAM and work.moments[1].scales is not None:
        values[0] = torch.where(work.moments[1].data == 0, 0.0, values[0])  # m counts as 0 where v is 0
    if p is work.param:
        p = p.clone()
    apply(work.rule, p, g, values, work.scalars, nesterov=work.nesterov)
    work.param.copy_(narrow(p, turns, work.block, work.param.dtype, stochastic=work.stochastic))
    for moment, value, (_, code) in zip(work.moments, values, names, strict=True):
        if moment.scales is None:
            continue
        lost = moment.data if float(work.scalars.dithered) > 0 else None
        codes, scales = encode(value, code, work.block, old=lost, turns=turns)
        moment.data.copy_(codes)
        moment.scales.copy_(scales)


def narrow(p: Tensor, turns: Tensor, block: int, dtype: torch.dtype, *, stochastic: bool) -> Tensor:
    """fp32 `p` in `dtype`; bf16 stochastically on request, by a hash of each element's place in the whole tensor.

    Adding uniform numbers below the last kept bit and cutting off rounds up in proportion to what is cut off, so the
    weight is right in the mean and small updates are not lost.
    """
    if not stochastic or dtype is not torch.bfloat16:
        return p.to(dtype)
    bits = p.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    add = weyl(mix_tensor(turns + 2), block).flatten()[: p.numel()] >> 16
    rounded = ((bits + add) & 0xFFFF0000).to(torch.int64)
    signed = torch.where(rounded >= 2**31, rounded - 2**32, rounded).to(torch.int32)
    return torch.where(p.isfinite(), signed.view(torch.float32), p).to(dtype)
