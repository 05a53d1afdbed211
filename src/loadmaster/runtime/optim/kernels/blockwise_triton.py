"""One optimizer step in Triton, a program a block: the same code, rounding and rules as blockwise.c."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["step_kernel"]


@triton.jit
def mix(x):
    """A 32-bit hash of uint32."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def dither(turn, lane, UPPER: tl.constexpr):
    """[1, 2), evenly spread over the block, from the upper or the lower bits."""
    weyl = turn + lane * 0x9E3779B9
    shifted = (weyl >> 9) if UPPER else (weyl << 5)
    return ((shifted & 0x7FFE00) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def inverse(top, scale):
    """top / scale, finite; 0 for an empty block."""
    return tl.where(scale > 0, tl.minimum(top / tl.where(scale > 0, scale, 1.0), 3.4028234e38), 0.0)


@triton.jit
def largest(x):
    """Largest magnitude by its bits, so that a NaN is the largest of all."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.reduce(bits, 0, tl.standard._elementwise_max).to(tl.float32, bitcast=True)


@triton.jit
def decode_signed(code, scale, TOP: tl.constexpr, OFFSET: tl.constexpr):
    """fp32 values of int8 codes."""
    bits = code.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = (bits << 1) - OFFSET
    value = ((bits & -2147483648) | magnitude).to(tl.float32, bitcast=True)
    unit = scale / TOP
    return tl.where(bits == 0, 0.0 * unit, value * unit)


@triton.jit
def decode_unsigned(code, scale, TOP: tl.constexpr, OFFSET: tl.constexpr):
    """fp32 values of uint8 codes."""
    bits = code.to(tl.float32).to(tl.int32, bitcast=True)
    value = ((bits << 2) - OFFSET).to(tl.float32, bitcast=True)
    unit = scale / TOP
    return tl.where(bits == 0, 0.0 * unit, value * unit)


@triton.jit
def nearest(y):
    """Nearest whole number, ties to even, of |y| < 2**22: adding 1.5 * 2**23 leaves no bit for a fraction."""
    return (y + 12582912.0) - 12582912.0


@triton.jit
def rounded(y, old, turn, lane, dithered, UPPER: tl.constexpr):
    """Nearest code, or a stochastic one where the nearest is the old code and the move would be lost."""
    near = nearest(y)
    far = tl.floor(y + dither(turn, lane, UPPER)) - 1.0
    return tl.where(near == old, tl.where(dithered > 0, far, near), near)


@triton.jit
def encode_signed(
    x, scale, old, turn, lane, dithered,
    TOP: tl.constexpr, HALF: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """int8 codes of fp32 values."""
    bits = (x * inverse(TOP, scale)).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    curve = ((magnitude >> 1) + HALF).to(tl.float32, bitcast=True)
    y = tl.minimum(curve, magnitude.to(tl.float32, bitcast=True) * UNIT)
    y = tl.where(bits < 0, -y, y)
    code = rounded(y, old.to(tl.float32), turn, lane, dithered, True)
    return tl.minimum(tl.maximum(code, -127.0), 127.0).to(tl.int8)


@triton.jit
def encode_unsigned(x, scale, old, turn, lane, dithered, TOP: tl.constexpr, HALF: tl.constexpr):
    """uint8 codes of fp32 values >= 0; what is not zero never becomes code 0."""
    bits = (x * inverse(TOP, scale)).to(tl.int32, bitcast=True)
    curve = ((bits >> 2) + HALF).to(tl.float32, bitcast=True)
    y = tl.where(x > 0, tl.maximum(curve, 1.0), 0.0)
    code = rounded(y, old.to(tl.float32), turn, lane, dithered, False)
    return tl.minimum(tl.maximum(code, 0.0), 255.0).to(tl.int32).to(tl.uint8)


@triton.jit
def step_kernel(
    param, grad, first, first_scale, second, second_scale, scalars, step_count, numel, first_block, seed, key,
    RULE: tl.constexpr, BLOCK: tl.constexpr, CODED: tl.constexpr, NESTEROV: tl.constexpr, STOCHASTIC: tl.constexpr,
    BF16: tl.constexpr, CAPTURED: tl.constexpr, S_OFFSET: tl.constexpr, U_OFFSET: tl.constexpr, S_TOP: tl.constexpr,
    U_TOP: tl.constexpr, S_UNIT: tl.constexpr, U_HALF: tl.constexpr, S_HALF: tl.constexpr,
):  # fmt: skip
    """A block's step: decode, update, find the scale, encode."""
    number = tl.program_id(0)
    place = (number + first_block).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    at = number.to(tl.int64) * BLOCK + lane
    live = at < numel
    beta1, beta2, rest1, rest2 = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 3)
    decay, l2, length, root = tl.load(scalars + 4), tl.load(scalars + 5), tl.load(scalars + 6), tl.load(scalars + 7)
    eps, dithered, grad_scale = tl.load(scalars + 8), tl.load(scalars + 9), tl.load(scalars + 10)
    if CAPTURED:
        hashed = mix(seed.to(tl.uint32) + tl.load(step_count).to(tl.uint32))
    else:
        hashed = key.to(tl.uint32)
    turn = mix(mix(hashed ^ (place >> 32).to(tl.uint32)) + place.to(tl.uint32))
    spread = lane.to(tl.uint32)

    p = tl.load(param + at, mask=live, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=live, other=0.0).to(tl.float32) * grad_scale
    if RULE != 2:
        g += l2 * p
    if RULE != 3:
        old_m = tl.load(first + at, mask=live, other=0)
        m = decode_signed(old_m, tl.load(first_scale + number), S_TOP, S_OFFSET) if CODED else old_m
    if RULE == 0 or RULE == 3:
        old_v = tl.load(second + at, mask=live, other=0)
        v = decode_unsigned(old_v, tl.load(second_scale + number), U_TOP, U_OFFSET) if CODED else old_v

    if RULE == 0:
        if CODED:
            m = tl.where(old_v == 0, 0.0, m)
        m = beta1 * m + rest1 * g
        v = beta2 * v + rest2 * (g * g)
        direction = m / (tl.sqrt(v) * root + eps)
    elif RULE == 1:
        m = beta1 * m + rest1 * g
        direction = g + beta1 * m if NESTEROV else m
    elif RULE == 2:
        mixed = beta1 * m + rest1 * g
        direction = tl.where(mixed > 0, 1.0, tl.where(mixed < 0, -1.0, mixed))
        m = beta2 * m + rest2 * g
    else:
        v += g * g
        direction = g / (tl.sqrt(v) + eps)
    p = decay * p - length * direction

    if BF16:
        bits = p.to(tl.uint32, bitcast=True)
        if STOCHASTIC:
            add = (mix(turn + 2) + spread * 0x9E3779B9) >> 16
        else:
            add = 0x7FFF + ((bits >> 16) & 1)
        special = (bits & 0x7F800000) == 0x7F800000
        p = tl.where(special, bits, (bits + add) & 0xFFFF0000).to(tl.float32, bitcast=True)
    tl.store(param + at, p.to(param.dtype.element_ty), mask=live)
    if RULE != 3:
        if CODED:
            scale = largest(m)
            tl.store(first + at, encode_signed(m, scale, old_m, turn, spread, dithered, S_TOP, S_HALF, S_UNIT), live)
            tl.store(first_scale + number, scale)
        else:
            tl.store(first + at, m, mask=live)
    if RULE == 0 or RULE == 3:
        if CODED:
            scale = largest(v)
            tl.store(second + at, encode_unsigned(v, scale, old_v, turn, spread, dithered, U_TOP, U_HALF), live)
            tl.store(second_scale + number, scale)
        else:
            tl.store(second + at, v, mask=live)
