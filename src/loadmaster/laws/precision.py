"""What half precision loses: updates that round away, gradients out of range, positions that collide, skipped steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loadmaster.describe.dtype import DType
from loadmaster.errors import InvalidInput

__all__ = [
    "ScaleStart", "clipped_while_scaled", "lost_below", "lost_share", "scale_range", "scale_start",
]  # fmt: skip


def lost_below(weight: float, dtype: DType) -> float:
    """Size of the update of `weight` below which the stored weight does not move.

    |u| < spacing / 2, the spacing that of the numbers between the weight and zero (half as wide at a power of two)

    The tie itself rounds to the even neighbour: it is lost at a power of two and for every second number.

    >>> bf16 = DType.named("bf16")
    >>> lost_below(1.0, bf16) == 2**-9, lost_below(0.5, bf16) == 2**-10, lost_below(0.75, bf16) == 2**-9
    (True, True, True)
    """
    if not math.isfinite(weight):
        raise InvalidInput("weight", weight, "must be finite", "look for the overflow first")
    mantissa, _ = math.frexp(abs(weight))
    at_power = mantissa == 0.5 and abs(weight) > dtype.smallest_normal
    return dtype.ulp(weight) / (4 if at_power else 2)


def lost_share(update: float, weight_std: float, dtype: DType) -> float:
    """Expected share of normally distributed weights that an update of size `update` leaves as they are.

    P(|w| >= 2^(floor(log2 u) + m + 2)) = erfc(that / (sigma sqrt 2))

    Between 2^E and 2^(E+1) the spacing is 2^(E - m), so the update is lost from the first binade on whose half
    spacing exceeds it. Adam's update is about the learning rate, whatever the gradient; assumes mean 0.

    Args:
        update: size of the update, about the learning rate for Adam.
        weight_std: standard deviation of the weights.
        dtype: the weights are kept in.

    >>> round(lost_share(6e-4, 0.5, DType.named("bf16")), 3), lost_share(6e-4, 0.02, DType.named("bf16")) < 1e-9
    (0.617, True)
    >>> lost_share(6e-4, 0.02, DType.named("fp32"))
    0.0
    """
    if update <= 0:
        return 1.0
    if weight_std <= 0:
        return 0.0
    threshold = math.ldexp(1.0, math.floor(math.log2(update)) + dtype.mantissa_bits + 2)
    return math.erfc(threshold / (weight_std * math.sqrt(2)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleStart:
    """How dynamic loss scaling begins: `skips` steps thrown away until it `settles_at` a scale."""

    skips: int
    settles_at: float

    @property
    def suggested_init(self) -> float:
        """Start here to lose no step."""
        return self.settles_at


def scale_start(
    max_gradient: float, *, init: float = 2.0**16, backoff: float = 0.5, dtype: DType | None = None, limit: int = 1000
) -> ScaleStart:
    """Steps skipped at the start of a run whose largest unscaled gradient stays at `max_gradient`.

    skips = the least k with max_gradient * init * backoff^k <= dtype.max

    Raises:
        InvalidInput: a gradient that is no finite number, or a backoff that does not shrink.

    >>> scale_start(0.75, init=2.0**32)
    ScaleStart(skips=16, settles_at=65536.0)
    """
    dtype = dtype or DType.named("fp16")
    if not math.isfinite(max_gradient) or max_gradient < 0:
        raise InvalidInput("max_gradient", max_gradient, "must be a finite size", "look for inf or nan in fp32 first")
    if not 0 < backoff < 1 or init <= 0:
        raise InvalidInput("backoff", backoff, "must lie between 0 and 1, init above 0", "use 0.5 and 65536")
    scale, skips = init, 0
    while dtype.overflows(max_gradient * scale) and skips < limit:
        scale, skips = scale * backoff, skips + 1
    return ScaleStart(skips=skips, settles_at=scale)


def scale_range(min_gradient: float, max_gradient: float, dtype: DType | None = None) -> tuple[float, float]:
    """Powers of two between which a loss scale keeps `min_gradient` from zero and `max_gradient` from infinity.

    low: min_gradient * S rounds to no zero; high: max_gradient * S <= dtype.max. Where low > high no scale serves.

    >>> low, high = scale_range(1e-9, 0.75)
    >>> low, high
    (32.0, 65536.0)
    """
    dtype = dtype or DType.named("fp16")
    high = math.inf if max_gradient <= 0 else 2.0 ** math.floor(math.log2(dtype.max / max_gradient))
    if min_gradient <= 0:
        return 1.0, high
    low = 2.0 ** math.ceil(math.log2(dtype.smallest_subnormal / 2 / min_gradient))
    while dtype.underflows(min_gradient * low):
        low *= 2
    return max(low, 2.0**-24), high


def clipped_while_scaled(norm: float, scale: float, max_norm: float) -> tuple[float, float]:
    """Norm reported, and norm really applied, when gradients are clipped before the scale is taken out.

    Right order: unscale, norm, clip. Wrong order: reported = norm * scale, applied = min(norm, max_norm / scale).

    >>> clipped_while_scaled(0.5, 65536, 1.0)
    (32768.0, 1.52587890625e-05)
    """
    return norm * scale, min(norm, max_norm / scale)
