"""Which kernel does a step: Triton on CUDA, C on the CPU, plain PyTorch for the rest."""

from __future__ import annotations

from collections.abc import Sequence

from loadmaster.errors import InvalidInput
from loadmaster.runtime.optim import native, reference, triton_kernel
from loadmaster.runtime.optim.work import Work

__all__ = ["KERNELS", "name", "run"]

KERNELS = ("auto", "native", "triton", "reference")


def run(works: Sequence[Work], choice: str) -> None:
    """Step every tensor, batched by the kernel that takes it.

    Raises:
        InvalidInput: the kernel asked for cannot run here, or not on these tensors.
    """
    batches: dict[str, list[Work]] = {}
    for work in works:
        batches.setdefault(_choose(work, choice), []).append(work)
    for which, batch in batches.items():
        {"native": native, "triton": triton_kernel, "reference": reference}[which].step(batch)


def _choose(work: Work, choice: str) -> str:
    if choice == "reference":
        return choice
    for which, module in (("native", native), ("triton", triton_kernel)):
        if choice in ("auto", which) and module.supports(work) and module.available():
            if choice == "auto" and which == "triton" and work.param.device.type != "cuda":
                continue
            return which
    if choice == "auto":
        return "reference"
    raise InvalidInput(
        "optimizer.kernel", choice, f"cannot step a {work.param.dtype} tensor on {work.param.device.type} here",
        "use kernel='auto'",
    )  # fmt: skip


def name(choice: str = "auto", device: str = "cpu") -> str:
    """The kernel that would run on fp32 tensors of `device`, for people."""
    if choice not in KERNELS:
        raise InvalidInput("optimizer.kernel", choice, "is not known", f"use one of {', '.join(KERNELS)}")
    if choice in ("auto", "native") and device == "cpu" and native.available():
        return native.name()
    if choice == "triton" or (choice == "auto" and device == "cuda" and triton_kernel.available()):
        return triton_kernel.NAME
    return reference.NAME
