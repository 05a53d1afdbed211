"""The numbers of a model that the degrees of a layout have to divide, and the padded vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loadmaster.describe.model import Model
from loadmaster.describe.op import Split

__all__ = ["Dimensions", "padded_vocab"]

VOCAB_UNIT = 128  # rows a tp rank's share of the vocabulary is a multiple of


def padded_vocab(vocab_size: int, tp: Any = 1, *, padding: int = 0) -> Any:
    """Rows of the embedding once padded, ``ceil(V / (unit * tp)) * unit * tp`` (Megatron-LM's rule, unit 128).

    `padding` is `Layout.vocab_padding`: 0 the usual unit of 128, 1 none, else the unit. `tp` may be an array.

    >>> padded_vocab(50257), padded_vocab(50257, 2), padded_vocab(50257, 8), padded_vocab(151669, 4)
    (50304, 50432, 51200, 152064)
    """
    unit = (padding or VOCAB_UNIT) * tp
    return -(-vocab_size // unit) * unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """The numbers of a model that degrees have to divide.

    Attributes:
        heads, kv_heads: of every attention, without repeats; widths: other dimensions that tp splits.
        experts: of every mixture layer, without repeats; empty for a dense model.
        traced: read off a module, so that nothing says how its matrices would be split.
    """

    num_layers: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    widths: tuple[int, ...]
    experts: tuple[int, ...]
    vocab_size: int
    max_seq_len: int | None
    traced: bool = False

    @classmethod
    def of(cls, model: Model) -> Dimensions:
        """Read them off the op tables."""
        cores = [op.attention for block, _ in model.blocks for op in block.ops if op.attention is not None]
        weights = [w for block, _ in model.blocks for w in block.weights]
        return cls(
            num_layers=model.num_layers,
            heads=_unique(a.num_heads for a in cores),
            kv_heads=_unique(a.num_kv_heads for a in cores),
            widths=_unique(w.shape[w.split_dim] for w in weights if w.split is Split.TP and not w.split_units),
            experts=_unique(w.num_experts for w in weights if w.num_experts > 1),
            vocab_size=model.vocab_size,
            max_seq_len=model.max_seq_len,
            traced=model.family == "traced",
        )


def _unique(values: Any) -> tuple[int, ...]:
    return tuple(sorted(set(values)))
