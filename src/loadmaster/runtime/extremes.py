"""How large and how small numbers get: counts of elements by binary exponent, from which any format's losses follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from loadmaster.describe.dtype import DType

__all__ = ["Exponents", "Watch"]

_LOW, _HIGH = -160, 130  # binary exponents of fp32, subnormals included


@dataclass(slots=True)
class Exponents:
    """Counts of nonzero elements by exponent e, 2^(e-1) <= |x| < 2^e, with the largest and what is not finite.

    >>> seen = Exponents(); seen.add(torch.tensor([0.0, 1e-9, 1.0, 1e5]))
    >>> fp16 = DType.named("fp16")
    >>> seen.largest, seen.share_lost(fp16), seen.share_lost(fp16, scale=2.0**10)
    (100000.0, 0.333..., 0.0)
    """

    counts: Tensor = field(default_factory=lambda: torch.zeros(_HIGH - _LOW + 1, dtype=torch.int64))
    largest: float = 0.0
    not_finite: int = 0

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Count the elements of `x`."""
        if not x.is_floating_point() or not x.numel():
            return
        magnitude = x.detach().float().abs().flatten()
        finite = torch.isfinite(magnitude)
        if not bool(finite.all()):
            self.not_finite += int((~finite).sum())
            magnitude = magnitude[finite]
        magnitude = magnitude[magnitude > 0]
        if magnitude.numel():
            self.largest = max(self.largest, float(magnitude.max()))
            places = torch.frexp(magnitude)[1].long() - _LOW
            self.counts += torch.bincount(places.clamp_(0, _HIGH - _LOW), minlength=len(self.counts)).cpu()

    def merge(self, other: Exponents) -> None:
        """Take another's counts in."""
        self.counts = self.counts + other.counts
        self.largest = max(self.largest, other.largest)
        self.not_finite += other.not_finite

    @property
    def total(self) -> int:
        """Nonzero finite elements."""
        return int(self.counts.sum())

    def share_lost(self, dtype: DType, *, scale: float = 1.0) -> float:
        """Share of them that become zero in `dtype` after multiplication by `scale` (a power of two).

        Those below half the smallest subnormal: |x| * scale < 2^(1 - bias - m - 1).
        """
        if not self.total:
            return 0.0
        bound = torch.tensor(dtype.smallest_subnormal / 2 / scale)
        place = int(torch.frexp(bound)[1]) - 1 - _LOW  # exponents up to this one lie below the bound
        return int(self.counts[: max(0, place + 1)].sum()) / self.total

    def quantile(self, share: float) -> float:
        """A size that `share` of the elements lie below, to a factor of two."""
        if not self.total:
            return 0.0
        place = int(torch.searchsorted(torch.cumsum(self.counts, 0), torch.tensor(share * self.total)))
        return float(2.0 ** (min(place, _HIGH - _LOW) + _LOW))


class Watch:
    """Follows what every leaf module puts out, and the gradient that comes back to it."""

    def __init__(self, module: nn.Module) -> None:
        self.outputs: dict[str, Exponents] = {}
        self.gradients: dict[str, Exponents] = {}
        self._handles = [
            child.register_forward_hook(self._hook(name or type(child).__name__))
            for name, child in module.named_modules()
            if not any(True for _ in child.children())
        ]

    def _hook(self, name: str) -> Callable[[nn.Module, object, object], None]:
        def seen(module: nn.Module, inputs: object, output: object) -> None:
            for tensor in output if isinstance(output, tuple | list) else (output,):
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    self.outputs.setdefault(name, Exponents()).add(tensor)
                    if tensor.requires_grad:
                        tensor.register_hook(  # type: ignore[no-untyped-call]
                            lambda gradient: self.gradients.setdefault(name, Exponents()).add(gradient)
                        )

        return seen

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
