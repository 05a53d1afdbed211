"""Recompute: what a checkpointed block's backward makes again, and when; what it costs in FLOPs is `laws.flops`.

A checkpoint keeps the block's input and runs its forward again. ``full`` does so for every block, so its backward
starts with a whole block's tensors; ``blocks`` for the first blocks of a stage, which run backward last, when the
others have let go of theirs; ``selective`` within a block.
"""

from __future__ import annotations

from loadmaster.describe.model import Block
from loadmaster.laws.activations import activation_polynomials, input_polynomial
from loadmaster.laws.kept import block_terms, checkpointed_layers
from loadmaster.laws.numbers import Number, greater, where
from loadmaster.laws.placement import Placement
from loadmaster.laws.run import Run
from loadmaster.laws.working_set import backward_transients

__all__ = ["backward_terms", "last_backward_terms"]

Terms = dict[str, Number]


def backward_terms(run: Run, placement: Placement) -> Terms:
    """At the start of a backward: the working set of a block, and what it makes again."""
    transient: Number = 0
    again: Number = 0
    for block, count in placement.blocks:
        present = where(count > 0, 1, 0)
        transient = greater(transient, _transient(run, block) * present)
        if run.layout.recompute in ("full", "selective"):
            again = greater(again, _made_again(run, block) * present)
    return {"transient": transient, "activations/recomputed": again}


def last_backward_terms(run: Run, placement: Placement) -> Terms:
    """At the end of a backward under ``blocks``: the checkpoints left, one block made again, its working set."""
    if run.layout.recompute != "blocks":
        return {}
    transient: Number = 0
    again: Number = 0
    inputs: Number = 0
    for block, count in placement.blocks:
        layers = checkpointed_layers(run, placement, block, count)
        present = where(layers > 0, 1, 0)
        transient = greater(transient, _transient(run, block) * present)
        again = greater(again, _made_again(run, block) * present)
        inputs = inputs + layers * input_polynomial(block, run.precision, run.stack)(run.shape)
    return {"transient": transient, "activations/recomputed": again + inputs}


def _made_again(run: Run, block: Block) -> Number:
    """What a block would keep without recompute, less what it kept."""
    key = ("again", id(block))
    if key not in run.known:
        whole = sum(p(run.shape) for _, _, p in activation_polynomials(block, run.stack, run.precision, False))
        if run.layout.recompute == "selective":
            kept = sum(block_terms(run, block).values())
        else:
            kept = input_polynomial(block, run.precision, run.stack)(run.shape)
        run.known[key] = greater(whole - kept, 0)
    return run.known[key]


def _transient(run: Run, block: Block) -> Number:
    key = ("transient", id(block))
    if key not in run.known:
        worst: Number = 0
        for polynomial in backward_transients(block, run.stack, run.precision):
            worst = greater(worst, polynomial(run.shape))
        run.known[key] = worst
    return run.known[key]
