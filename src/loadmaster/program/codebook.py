"""The 8-bit codes of optimizer moments: tables that check themselves, and which tensors are coded.

A code is a whole number 0..top whose own float representation carries the value: with `taper` t,

    bits(curve(c)) = (bits(float(c)) << t) - offset        value(c) = scale * curve(c) / curve(top)

so the leading bit of `c` sets the exponent in steps of 2**t octaves and the bits below it are fraction: the idea of the
dynamic-exponent ("dynamic tree") data type of Dettmers et al. (2021, arXiv:2110.02861), in base 2**(2**t) instead of
base 10. Large magnitudes get the most fraction bits, small ones the most range, and both directions are a shift and an
addition: nothing is searched or looked up. It is not bitsandbytes' table; states are not interchangeable.

The block grid and the choice of coded tensors are fixed on the whole parameter, so they do not depend on a layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from loadmaster.errors import InvalidInput

__all__ = [
    "BLOCKS", "DEFAULT_BLOCK", "FIRST_MOMENT", "LINEAR", "MIN_ELEMENTS", "SECOND_MOMENT",
    "Code", "aligned_ranges", "alignment", "check_block", "is_coded", "looks_like_embedding", "num_blocks",
]  # fmt: skip

Array = npt.NDArray[np.float32]

DEFAULT_BLOCK = 256
BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)
MIN_ELEMENTS = 4096  # below it a tensor keeps 32-bit state: nothing to gain, and biases and norms are sensitive
_EMBEDDING_NAMES = (
    "embed",
    "embedding",
    "embeddings",
    "wte",
    "wpe",
    "embed_tokens",
    "embed_positions",
    "embed_in",
    "shared",
)


@dataclass(frozen=True)
class Code:
    """One 8-bit code.

    Attributes:
        name: as printed.
        signed: codes -127..127 kept as int8; otherwise 0..255 as uint8.
        taper: octaves one leading bit spans, as a power of two: 0 is the linear code, 1 spans 2, 2 spans 4.

    >>> FIRST_MOMENT.top, SECOND_MOMENT.top, float(FIRST_MOMENT.values[0]), float(FIRST_MOMENT.values[127])
    (127, 255, 0.0, 1.0)
    >>> f"{SECOND_MOMENT.smallest:.2g}", f"{FIRST_MOMENT.smallest:.2g}", f"{LINEAR.smallest:.2g}"
    ('2.4e-10', '6.2e-05', '0.0079')
    """

    name: str
    signed: bool
    taper: int

    def __post_init__(self) -> None:
        values = self.values.astype(np.float64)
        assert (values[0], values[-1]) == (0.0, 1.0), "zero and the block's largest magnitude are exact"
        assert bool(np.all(np.diff(values) > 0)), "codes are in the order of their values"
        assert np.array_equal(self.encode(self.values), np.arange(self.top + 1)), "decoding and encoding returns a code"

    @property
    def top(self) -> int:
        """Largest code."""
        return 127 if self.signed else 255

    @cached_property
    def offset(self) -> int:
        """What brings curve(top) into [1, 2), modulo 2**32; its low 23 bits are zero, so it can be shifted back."""
        exponent = int(np.float32(self.top).view(np.uint32)) << self.taper >> 23
        return ((exponent - 127) << 23) % 2**32

    @cached_property
    def unit(self) -> float:
        """curve(1), a power of two: below it encoding is linear, so small first moments round without bias."""
        return float(self.curve(np.ones(1))[0])

    def curve(self, codes: npt.ArrayLike) -> Array:
        """Values before scaling, in [0, 2); exact in fp32.

        >>> FIRST_MOMENT.curve([0, 1, 2, 3, 4, 127]).tolist()
        [0.0, 0.0001220703125, 0.00048828125, 0.0009765625, 0.001953125, 1.96875]
        """
        bits = np.asarray(codes, dtype=np.float32).view(np.uint32).astype(np.uint64)
        shifted = ((bits << np.uint64(self.taper)) - np.uint64(self.offset)) % np.uint64(2**32)
        value: Array = np.where(bits == 0, 0, shifted.astype(np.uint32).view(np.float32)).astype(np.float32)
        return value

    @cached_property
    def values(self) -> Array:
        """Value of every code 0..top relative to the block's scale."""
        curve = self.curve(np.arange(self.top + 1))
        value: Array = curve / curve[-1]
        return value

    @property
    def smallest(self) -> float:
        """Smallest value that is not zero, relative to the block's scale."""
        return float(self.values[1])

    def coordinate(self, x: npt.ArrayLike) -> Array:
        """Real-valued code of magnitudes `x` (relative to the scale): whole numbers are codes, halves are ties."""
        t = (np.asarray(x, dtype=np.float32) * self.curve(self.top)).astype(np.float32)
        y = ((t.view(np.uint32) >> np.uint32(self.taper)) + np.uint32(self.offset >> self.taper)).view(np.float32)
        if self.signed:
            lowest: Array = np.minimum(y, t / np.float32(self.unit))
            return lowest
        highest: Array = np.where(t > 0, np.maximum(y, np.float32(1)), 0).astype(np.float32)
        return highest

    def encode(self, x: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Nearest codes of magnitudes in [0, 1]; an unsigned magnitude that is not zero never becomes code 0.

        >>> SECOND_MOMENT.encode([0.0, 1e-30, 0.5, 1.0]).tolist(), FIRST_MOMENT.encode([1e-30, 0.25]).tolist()
        ([0, 1, 223, 255], [0, 64])
        """
        codes: npt.NDArray[np.int64] = np.minimum(np.rint(self.coordinate(x)), self.top).astype(np.int64)
        return codes

    def decode(self, codes: npt.ArrayLike) -> Array:
        """Values of codes, relative to the scale."""
        values: Array = self.values[np.asarray(codes)]
        return values

    def worst_relative_error(self) -> Array:
        """Largest relative error of rounding to nearest in each gap between codes c and c + 1, c = 1..top - 1.

        half / (value(c) + half), half the gap: at the tie between them.

        >>> [round(float(FIRST_MOMENT.worst_relative_error()[c - 1]), 4) for c in (64, 32, 16, 8)]
        [0.0154, 0.0303, 0.0588, 0.1111]
        >>> [round(float(SECOND_MOMENT.worst_relative_error()[c - 1]), 4) for c in (128, 64, 32, 16)]
        [0.0154, 0.0303, 0.0588, 0.1111]
        """
        low, high = self.values[1:-1], self.values[2:]
        half = (high - low) / 2
        worst: Array = (half / (low + half)).astype(np.float32)
        return worst


LINEAR = Code("linear, signed", signed=True, taper=0)
FIRST_MOMENT = Code("dynamic exponent, signed, 2 octaves a leading bit", signed=True, taper=1)
SECOND_MOMENT = Code("dynamic exponent, unsigned, 4 octaves a leading bit", signed=False, taper=2)


def check_block(block: int) -> int:
    """`block` if it is allowed.

    Raises:
        InvalidInput: not a power of two from 64 to 4096.
    """
    if block not in BLOCKS:
        raise InvalidInput("optimizer.block", block, "is not a power of two from 64 to 4096", "use 256")
    return block


def num_blocks(numel: int, block: int = DEFAULT_BLOCK) -> int:
    """Blocks, and so scales, of `numel` elements that start on the grid.

    >>> num_blocks(1001), num_blocks(256), num_blocks(0)
    (4, 1, 0)
    """
    return -(-numel // block)


def alignment(block: int = DEFAULT_BLOCK) -> int:
    """Elements a shard boundary inside a parameter must be a multiple of (counted from the parameter's start).

    A block's scale is the largest magnitude of the whole block, so a block has one owner.
    """
    return check_block(block)


def is_coded(full_numel: int, *, is_embedding: bool, min_elements: int = MIN_ELEMENTS) -> bool:
    """Whether a parameter gets 8-bit state, by its *whole* size and role, never by a shard's.

    >>> is_coded(1001 * 7, is_embedding=False), is_coded(4095, is_embedding=False), is_coded(10**6, is_embedding=True)
    (True, False, False)
    """
    return full_numel >= min_elements and not is_embedding


def looks_like_embedding(name: str) -> bool:
    """Whether a parameter's name says embedding, for those who have only names.

    >>> looks_like_embedding("transformer.wte.weight"), looks_like_embedding("model.layers.0.mlp.up_proj.weight")
    (True, False)
    >>> looks_like_embedding("bert.embeddings.word_embeddings.weight"), looks_like_embedding("embed.q_proj.weight")
    (True, False)
    """
    parts = name.split(".")
    module = parts[-2] if len(parts) > 1 and parts[-1] == "weight" else parts[-1]
    return module in _EMBEDDING_NAMES or module.endswith(("_embedding", "_embeddings", "_embed"))


def aligned_ranges(numel: int, ranks: int, block: int = DEFAULT_BLOCK) -> tuple[tuple[int, int], ...]:
    """One range a rank, as even as whole blocks allow; late ranks may get nothing.

    >>> aligned_ranges(1001, 3), aligned_ranges(91, 2)
    (((0, 512), (512, 1001), (1001, 1001)), ((0, 91), (91, 91)))
    """
    share = -(-num_blocks(numel, block) // ranks) * block
    return tuple((min(r * share, numel), min((r + 1) * share, numel)) for r in range(ranks))
