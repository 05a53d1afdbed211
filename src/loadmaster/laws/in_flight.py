"""Micro-batches in flight: how many forwards a stage has done whose backward is still to come, at the worst moment."""

from __future__ import annotations

from loadmaster.laws.numbers import Number, clip, floor_div, lesser, where

__all__ = ["chunks_in_flight", "per_chunk"]


def chunks_in_flight(
    schedule: str, *, pp: Number, stage: Number, virtual_stages: Number, micro_batches: Number
) -> Number:
    """Peak number of chunk activations that pipeline rank `stage` holds; a micro-batch is `virtual_stages` of them.

    With v chunks a rank, m micro-batches and p ranks, rank i counted from 0::

        gpipe               m v
        1f1b                min(p - i, m) v
        interleaved_1f1b    min(2 (p - i - 1) + (v - 1) p + 1, m v)
        zb_h1               min(p, m) v: weight gradients wait, so every stage holds what the first does
        zb_v, dualpipe_v    min(2 p, 2 m); min(2 p + 1, 2 m)

    Interleaving never holds less than 1f1b. Sources: Narayanan et al. 2021 (arXiv 2104.04473) section 2.2;
    Megatron-LM ``pipeline_parallel/schedules.py``; Qi et al. 2024 (arXiv 2401.10241), table 2.

    >>> [chunks_in_flight("1f1b", pp=4, stage=i, virtual_stages=1, micro_batches=8) for i in range(4)]
    [4, 3, 2, 1]
    >>> chunks_in_flight("interleaved_1f1b", pp=4, stage=0, virtual_stages=2, micro_batches=8)  # 5.5 micro-batches
    11
    """
    p, i, v, m = pp, stage, virtual_stages, micro_batches
    plain = lesser(p - i, m) * v
    match schedule:
        case "gpipe":
            return m * v
        case "interleaved_1f1b":
            warm_up = 2 * (p - i - 1) + (v - 1) * p + 1
            return where(v > 1, lesser(warm_up, m * v), plain)
        case "zb_h1":
            return lesser(p, m) * v
        case "zb_v":
            return lesser(p, m) * v
        case "dualpipe_v":
            return lesser(p * v + 1, m * v)
        case _:
            return plain


def per_chunk(schedule: str, in_flight: Number, *, pp: Number, virtual_stages: Number, most: int) -> list[Number]:
    """How the `in_flight` chunk activations divide over the rank's chunks, `most` of them at the largest.

    An interleaved pipeline forwards p micro-batches through a chunk before it goes on to the next.

    >>> per_chunk("interleaved_1f1b", 9, pp=4, virtual_stages=3, most=3)
    [4, 4, 1]
    >>> per_chunk("zb_v", 8, pp=4, virtual_stages=2, most=2)
    [4, 4]
    """
    if schedule == "interleaved_1f1b":
        rounds = floor_div(in_flight, pp * virtual_stages)
        rest = in_flight - rounds * pp * virtual_stages
        return [rounds * pp + clip(rest - c * pp, 0, pp) for c in range(most)]
    return [
        where(c < virtual_stages, floor_div(in_flight + virtual_stages - 1 - c, virtual_stages), 0) for c in range(most)
    ]
