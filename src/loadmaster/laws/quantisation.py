"""Blockwise 8-bit optimizer state: its bytes, what it saves of a peak, and what coding loses.

A coded moment takes one byte an element and one fp32 scale a block; embeddings and tensors under 4096 elements keep
4 bytes. For Adam over P elements in blocks of B:

    fp32: 8 P        8-bit: 2 P_coded + 8 ceil(P_coded / B) + 8 P_exempt

Source: Dettmers et al. 2021, arXiv:2110.02861 (blockwise codes; embeddings kept in 32 bits for stability).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loadmaster.describe.model import Model
from loadmaster.describe.op import OpKind, Split
from loadmaster.describe.workload import OPTIMIZERS
from loadmaster.program.codebook import DEFAULT_BLOCK, MIN_ELEMENTS, Code, is_coded, num_blocks
from loadmaster.units import format_bytes

__all__ = [
    "Error", "Saving", "StateBytes", "StateElements", "coding_error", "predict_saving", "share_lost",
    "state_bytes", "state_elements", "state_terms",
]  # fmt: skip

Number = Any  # a Python number or a NumPy array
SCALE_BYTES = 4
WORTH_IT = 0.05  # below this share of the peak the switch is not advised
_MOMENT_TERMS = {
    "adamw": ("exp_avg", "exp_avg_sq"), "adam": ("exp_avg", "exp_avg_sq"), "sgd": (), "sgd_momentum": ("momentum",),
    "lion": ("exp_avg",), "adagrad": ("sum",),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StateElements:
    """Elements that carry state.

    Attributes:
        coded: elements with 8-bit moments; blocks: their scales a moment; exempt: elements with 32-bit moments.
    """

    coded: int
    blocks: int
    exempt: int

    def __add__(self, other: StateElements) -> StateElements:
        return StateElements(
            coded=self.coded + other.coded, blocks=self.blocks + other.blocks, exempt=self.exempt + other.exempt
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of optimizer state: `moments` (codes and fp32 moments together) and `scales`."""

    moments: Number
    scales: Number

    @property
    def total(self) -> Number:
        """Both."""
        return self.moments + self.scales


def state_elements(
    model: Model,
    *,
    tp: int = 1,
    block: int = DEFAULT_BLOCK,
    min_elements: int = MIN_ELEMENTS,
    embedding_coded: bool = False,
) -> StateElements:
    """Coded and exempt elements of a whole model; with tensor parallelism, of one of `tp` ranks.

    Whether a tensor is coded is decided on the whole parameter; each tensor has its own block grid.
    """
    total = StateElements(coded=0, blocks=0, exempt=0)
    for full, local, copies, embedding in _tensors(model, tp):
        coded = is_coded(full, is_embedding=embedding and not embedding_coded, min_elements=min_elements)
        total += StateElements(
            coded=local * copies * coded, blocks=num_blocks(local, block) * copies * coded,
            exempt=local * copies * (not coded),
        )  # fmt: skip
    return total


def _tensors(model: Model, tp: int) -> Iterator[tuple[int, int, int, bool]]:
    """(whole elements, elements on a rank, copies, is an embedding) of every trained tensor that owns its storage."""
    for part, repeat in model.parts():
        for op in part.ops:
            for weight in op.weights:
                if weight.trainable and weight.tied_to is None:
                    one = int(np.prod(weight.shape)) * (weight.num_experts if weight.stacked else 1)
                    copies = repeat * (1 if weight.stacked else weight.num_experts)
                    local = -(-one // tp) if weight.split is Split.TP else one
                    yield one, local, copies, op.kind in (OpKind.EMBEDDING, OpKind.POSITION)


def state_bytes(elements: StateElements, *, moments: Number, bits: Number = 8) -> StateBytes:
    """Bytes of `moments` moments over `elements`, whole or one rank's.

    bits = 8:  moments (coded + 4 exempt) + 4 moments blocks        bits = 32:  4 moments (coded + exempt)

    >>> one = StateElements(coded=1024, blocks=4, exempt=10)
    >>> state_bytes(one, moments=2).total, state_bytes(one, moments=2, bits=32).total
    (2160, 8272)
    """
    eight = np.equal(bits, 8)
    moment = moments * np.where(eight, elements.coded + 4 * elements.exempt, 4 * (elements.coded + elements.exempt))
    scales = moments * np.where(eight, SCALE_BYTES * elements.blocks, 0)
    return StateBytes(moments=_plain(moment), scales=_plain(scales))


def state_terms(
    ranges: Iterable[tuple[int, bool, int, int]],
    *,
    optimizer: str = "adamw",
    bits: int = 8,
    block: int = DEFAULT_BLOCK,
    min_elements: int = MIN_ELEMENTS,
) -> dict[str, int]:
    """Ledger terms of one rank, to the byte.

    Args:
        ranges: (whole parameter's elements, it is an embedding, start, stop) of what the rank owns; an owned padding
            has no state, since state is kept per parameter range.
        optimizer: a name of `OPTIMIZERS`.
        bits: 8 or 32.
        block: elements a scale.
        min_elements: smaller parameters keep 32 bits.

    >>> state_terms([(66 * 256, False, 0, 8448), (300, False, 0, 300)])
    {'optimizer/exp_avg': 9648, 'optimizer/exp_avg_sq': 9648, 'optimizer/scales': 264}
    """
    each = scales = 0
    for full, embedding, start, stop in ranges:
        coded = bits == 8 and is_coded(full, is_embedding=embedding, min_elements=min_elements)
        each += (stop - start) * (1 if coded else 4)
        scales += SCALE_BYTES * num_blocks(stop - start, block) if coded else 0
    names = _MOMENT_TERMS[optimizer]
    terms = {f"optimizer/{name}": each for name in names}
    return terms | ({"optimizer/scales": scales * len(names)} if names else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What 8-bit state would save.

    Attributes:
        before, after: bytes of state in 32 and in 8 bits; peak: bytes of the whole step's peak before.
    """

    before: int
    after: int
    peak: int

    @property
    def bytes_saved(self) -> int:
        """32-bit less 8-bit state."""
        return self.before - self.after

    @property
    def share_of_peak(self) -> float:
        """Saved, of the peak."""
        return self.bytes_saved / self.peak

    @property
    def worth_it(self) -> bool:
        """Whether it is more than `WORTH_IT` of the peak."""
        return self.share_of_peak >= WORTH_IT

    def __str__(self) -> str:
        verdict = "worth it" if self.worth_it else "not worth it here"
        return (
            f"8-bit state saves {format_bytes(self.bytes_saved)} of {format_bytes(self.before)} state, "
            f"{100 * self.share_of_peak:.1f} % of your peak of {format_bytes(self.peak)}: {verdict}"
        )


def predict_saving(elements: StateElements | int, *, peak_bytes: int, optimizer: str = "adamw") -> Saving:
    """Saving before anyone switches; a bare count of parameters is taken as all coded, scales left out.

    Bytes are of what is allocated; what a driver reports also holds the allocator's cache, which does not shrink.

    >>> print(predict_saving(25_557_032, peak_bytes=9_600 * 2**20, optimizer="adam"))
    8-bit state saves 146.24 MiB of 194.98 MiB state, 1.5 % of your peak of 9.38 GiB: not worth it here
    """
    if isinstance(elements, int):
        elements = StateElements(coded=elements, blocks=0, exempt=0)
    moments = OPTIMIZERS[optimizer]
    before = state_bytes(elements, moments=moments, bits=32).total
    after = state_bytes(elements, moments=moments, bits=8).total
    return Saving(before=before, after=after, peak=peak_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """What coding did to a tensor.

    Attributes:
        mean_relative, median_relative, worst_relative: of the elements that are not zero.
        lost: share of the elements that are not zero and became zero.
    """

    mean_relative: float
    median_relative: float
    worst_relative: float
    lost: float


def coding_error(x: npt.ArrayLike, code: Code, *, block: int = DEFAULT_BLOCK) -> Error:
    """Measure nearest rounding of `code` on `x`; block 0 takes one scale for the whole tensor.

    >>> coding_error(np.ones(512), Code("linear", signed=True, taper=0))
    Error(mean_relative=0.0, median_relative=0.0, worst_relative=0.0, lost=0.0)
    """
    values = np.asarray(x, dtype=np.float32).ravel()
    rows = _blocks(values, block)
    scale = np.abs(rows).max(axis=1, keepdims=True)
    unit = np.divide(np.abs(rows), scale, out=np.zeros_like(rows), where=scale > 0)
    back = code.decode(code.encode(unit)) * scale
    some = rows != 0
    relative = np.abs(back - np.abs(rows))[some] / np.abs(rows)[some]
    return Error(
        mean_relative=float(relative.mean()),
        median_relative=float(np.median(relative)),
        worst_relative=float(relative.max()),
        lost=float((back[some] == 0).mean()),
    )


def share_lost(v: npt.ArrayLike, *, levels: int = 255, block: int = 0) -> float:
    """Share of the second moments above zero that a *linear* unsigned code of `levels` steps rounds to zero.

    Where v becomes 0 and m does not, Adam's update is m / eps: this is what makes plain linear codes diverge.

    >>> share_lost([1.0, 1e-3, 1e-4, 0.0], levels=255)
    0.6666666666666666
    """
    values = np.asarray(v, dtype=np.float64).ravel()
    rows = _blocks(values, block)
    scale = rows.max(axis=1, keepdims=True)
    codes = np.rint(levels * np.divide(rows, scale, out=np.zeros_like(rows), where=scale > 0))
    some = rows > 0
    return float((codes[some] == 0).mean())


def _blocks(values: npt.NDArray[Any], block: int) -> npt.NDArray[Any]:
    if block == 0:
        return values[None, :]
    return np.pad(values, (0, -len(values) % block)).reshape(-1, block)


def _plain(x: Any) -> Any:
    """A NumPy scalar as a Python int."""
    return int(x) if np.ndim(x) == 0 else x
