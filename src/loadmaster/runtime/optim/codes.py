"""Encoding and decoding moments in plain PyTorch: the truth the compiled kernels are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from loadmaster.program.codebook import Code, num_blocks

__all__ = ["code_dtype", "decode", "dither", "encode", "mix", "turn_of"]

GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio: its multiples are spread most evenly over a block
MASK = 0xFFFFFFFF
DITHER_MASK = 0x7FFE00  # 14 bits, so that the largest code plus the largest dither stays below the next code


def code_dtype(code: Code) -> torch.dtype:
    """int8 for a signed code, uint8 for an unsigned one."""
    return torch.int8 if code.signed else torch.uint8


def mix(x: int) -> int:
    """A 32-bit hash (the two-multiplication finaliser of C. Wellons' hash-prospector).

    >>> mix(0), mix(1) != mix(2)
    (0, True)
    """
    x &= MASK
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & MASK
    return x ^ (x >> 15)


def _mix(x: Tensor) -> Tensor:
    """`mix` of int64 tensors that hold 32-bit numbers."""
    x = x & MASK
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & MASK
    return x ^ (x >> 15)


def turn_of(key: int, first_block: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """A hash for each block, from the step's key and the block's place in the whole tensor: (count,) int64."""
    place = torch.arange(first_block, first_block + count, dtype=torch.int64, device=device)
    return _mix(_mix((key & MASK) ^ (place >> 32)) + (place & MASK))


def weyl(turns: Tensor, block: int) -> Tensor:
    """turn + i * golden modulo 2**32 inside each block: (blocks, block) int64."""
    lane = torch.arange(block, dtype=torch.int64, device=turns.device) * GOLDEN
    return (turns[:, None] + lane) & MASK


def dither(turns: Tensor, block: int, *, upper: bool) -> Tensor:
    """Evenly spread numbers in [1, 2) for each element, the same whatever the sharding: (blocks, block) fp32.

    From 14 of the 32 bits: the first moment takes upper ones, the second lower ones, so that they are independent.
    """
    bits = weyl(turns, block)
    bits = ((bits >> 9 if upper else bits << 5) & DITHER_MASK) | 0x3F800000
    return bits.to(torch.int32).view(torch.float32)


def blocks_of(x: Tensor, block: int) -> Tensor:
    """Flat `x` as (blocks, block), the last block padded with zeros; a view where nothing is padded."""
    rest = -x.numel() % block
    return (torch.nn.functional.pad(x, (0, rest)) if rest else x).view(-1, block)


def decode(codes: Tensor, scales: Tensor, code: Code, block: int) -> Tensor:
    """Flat fp32 values of flat `codes` with one scale a block.

    value = sign * curve(|code|) * (scale / curve(top))
    """
    curve = torch.from_numpy(code.curve(range(code.top + 1))).to(codes.device)
    number = blocks_of(codes, block).to(torch.int32)
    unit = (scales / float(curve[-1]))[:, None]
    signed = curve[number.abs().clamp(max=code.top)] * number.sign()
    return torch.where(number == 0, 0.0 * unit, signed * unit).flatten()[: codes.numel()]


def coordinate(x: Tensor, scales: Tensor, code: Code) -> Tensor:
    """Signed real-valued codes of (blocks, block) values: see `Code.coordinate`."""
    top = float(code.curve(code.top))
    inverse = torch.where(scales > 0, (top / scales).clamp(max=torch.finfo(torch.float32).max), 0.0)
    t = x.abs() * inverse[:, None]
    y = ((t.view(torch.int32) >> code.taper) + (code.offset >> code.taper)).view(torch.float32)
    if code.signed:
        return torch.copysign(torch.minimum(y, t / code.unit), x)
    return torch.where(x > 0, y.clamp(min=1.0), 0.0)


def encode(
    x: Tensor, code: Code, block: int, *, old: Tensor | None = None, turns: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes and scales of flat fp32 `x`.

    Each value goes to its nearest code. With `old` codes and `turns` given, a value whose nearest code is the one it
    had is rounded stochastically instead: to nearest, a decay of 0.1 % a step would be lost at every step.

    Args:
        x: flat values that start on the block grid.
        code: the code; unsigned ones take values >= 0.
        block: elements a scale.
        old: codes before the step.
        turns: a hash a block, from `turn_of`.

    Returns:
        Codes like `x`, and fp32 scales (blocks,): the largest magnitude, NaN or infinite if one of the block is.
    """
    values = blocks_of(x, block)
    magnitude = values.abs()
    scales = magnitude.view(torch.int32).amax(1).view(torch.float32)
    y = coordinate(values, scales, code)
    near = torch.round(y)
    if old is not None and turns is not None:
        far = torch.floor(y + dither(turns, block, upper=code.signed)) - 1
        near = torch.where(near == blocks_of(old, block), far, near)
    near = near.nan_to_num(0.0).clamp(-code.top, code.top)
    assert scales.numel() == num_blocks(x.numel(), block)
    return near.to(code_dtype(code)).flatten()[: x.numel()], scales
