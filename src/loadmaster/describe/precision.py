"""Which dtype each part of a step is kept and computed in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loadmaster.errors import InvalidInput

__all__ = ["BYTES", "Precision", "Rounding"]

BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


class Rounding(StrEnum):
    """How an update is written into a low-precision weight."""

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes of a step.

    Attributes:
        param: the weights a rank holds; compute: matrix products and activations; grad: gradients as kept;
        reduce: on the wire; master: a separate copy the optimizer updates (None: it updates `param`);
        moment: optimizer moments (before 8-bit coding).
        matmul: dtype of the blocks' linear products, where it is narrower than `compute` (FP8, NVFP4).
        gather: dtype in which sharded weights are gathered (compute where None).
        loss_scaling: dynamic loss scaling (fp16).

    >>> Precision.named("bf16-mixed").compute, Precision.named("bf16-master").master
    ('bf16', 'fp32')
    """

    param: str = "fp32"
    compute: str = "fp32"
    grad: str = "fp32"
    reduce: str = "fp32"
    master: str | None = None
    moment: str = "fp32"
    matmul: str | None = None
    loss_scaling: bool = False
    rounding: Rounding = Rounding.NEAREST

    def __post_init__(self) -> None:
        for field in ("param", "compute", "grad", "reduce", "moment", "master"):
            value = getattr(self, field)
            if value is not None and value not in BYTES:
                raise InvalidInput(f"precision.{field}", value, "is no known dtype", f"use one of {', '.join(BYTES)}")
        if self.rounding is Rounding.STOCHASTIC and self.param not in ("bf16", "fp16"):
            raise InvalidInput(
                "precision.rounding", "stochastic", f"is for 16-bit weights, not {self.param}", "use nearest"
            )

    @classmethod
    def named(cls, name: str) -> Precision:
        """A usual combination by name.

        Raises:
            InvalidInput: the name is not one of `PRECISIONS`.
        """
        if name not in PRECISIONS:
            raise InvalidInput("layout.precision", name, "is no known precision", f"use one of {', '.join(PRECISIONS)}")
        return PRECISIONS[name]


PRECISIONS = {
    # fp32 everywhere
    "fp32": Precision(),
    # fp32 weights, gradients and moments; bf16 copies for compute (autocast, or fully_shard's mixed precision)
    "bf16-mixed": Precision(compute="bf16"),
    "fp16-mixed": Precision(compute="fp16", loss_scaling=True),
    # bf16 weights and fp32 masters, gradients accumulated in fp32 (Megatron-Core, nanotron)
    "bf16-master": Precision(param="bf16", compute="bf16", grad="fp32", master="fp32"),
    "fp16-master": Precision(
        param="fp16", compute="fp16", grad="fp16", reduce="fp16", master="fp32", loss_scaling=True
    ),
    # the same two with the blocks' linear layers in FP8 or NVFP4; what is kept stays in 16 and 32 bits
    "fp8-mixed": Precision(compute="bf16", matmul="fp8_e4m3"),
    "fp8-master": Precision(param="bf16", compute="bf16", grad="fp32", master="fp32", matmul="fp8_e4m3"),
    "fp4-master": Precision(param="bf16", compute="bf16", grad="fp32", master="fp32", matmul="nvfp4"),
    # bf16 weights and gradients, fp32 masters and moments (DeepSpeed's bf16)
    "bf16-deepspeed": Precision(param="bf16", compute="bf16", grad="bf16", reduce="bf16", master="fp32"),
    # 16-bit everything, moments too; and the same with stochastic rounding of the weights
    "bf16": Precision(param="bf16", compute="bf16", grad="bf16", reduce="bf16", moment="bf16"),
    # bf16 weights, gradients and moments, gradients reduced (and kept over a window) in fp32
    "bf16-reduce-fp32": Precision(param="bf16", compute="bf16", grad="bf16", moment="bf16"),
    "bf16-stochastic": Precision(
        param="bf16", compute="bf16", grad="bf16", reduce="fp32", moment="fp32", rounding=Rounding.STOCHASTIC
    ),
}
