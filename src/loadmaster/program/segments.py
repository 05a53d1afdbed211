"""Segments: which blocks of a stage are recomputed in backward."""

from __future__ import annotations

from loadmaster.errors import InvalidInput

__all__ = ["recomputed_blocks"]


def recomputed_blocks(recompute: str, recompute_blocks: int, num_blocks: int) -> tuple[int, ...]:
    """Indices, within a stage of `num_blocks` blocks, that keep their input only and run forward twice.

    ``blocks`` recomputes the first `recompute_blocks`: they are the last to be needed, so their recomputation is at
    the end of the backward, when the rest has been freed.

    Raises:
        InvalidInput: more blocks than the stage has.

    >>> recomputed_blocks("blocks", 2, 4), recomputed_blocks("full", 0, 3), recomputed_blocks("selective", 0, 3)
    ((0, 1), (0, 1, 2), ())
    """
    match recompute:
        case "full":
            return tuple(range(num_blocks))
        case "blocks":
            if recompute_blocks > num_blocks:
                raise InvalidInput(
                    "layout.recompute_blocks", recompute_blocks, f"is more than the {num_blocks} blocks of a stage",
                    f"use at most {num_blocks}, or recompute=full",
                )  # fmt: skip
            return tuple(range(recompute_blocks))
        case _:
            return ()
