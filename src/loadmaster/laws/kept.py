"""Activations that a rank keeps for the micro-batches in flight, under the layout's recompute mode."""

from __future__ import annotations

from loadmaster.describe.model import Block
from loadmaster.laws.activations import activation_polynomials, input_polynomial
from loadmaster.laws.numbers import Number, ceil_div, floor_div, greater, lesser, where
from loadmaster.laws.placement import Placement
from loadmaster.laws.run import Run
from loadmaster.laws.working_set import backward_transients

__all__ = ["backward_terms", "block_terms", "kept_terms"]

Terms = dict[str, Number]


def kept_terms(run: Run, placement: Placement, in_flight: list[Number]) -> Terms:
    """Saved tensors of all chunk activations in flight; `in_flight` counts them chunk by chunk.

    ``sum over chunks of micro-batches * layers * bytes a layer``; a recomputed layer keeps its input only.
    """
    terms: Terms = {}
    for k, block in enumerate(placement.kinds):
        layers: Number = sum(n * chunk[k] for n, chunk in zip(in_flight, placement.chunks, strict=True))
        recomputed = _recomputed(run, placement, block, layers)
        for term, number in block_terms(run, block).items():
            terms[term] = terms.get(term, 0) + (layers - recomputed) * number
        if run.layout.recompute in ("full", "blocks"):
            name = "activations/checkpoint"
            number = input_polynomial(block, run.precision)(run.shape)
            terms[name] = terms.get(name, 0) + recomputed * number
    first = in_flight[0] * placement.embedding
    for block, count in ((run.model.embedding, first), (run.model.head, placement.head)):
        for term, number in block_terms(run, block).items():
            terms[term] = terms.get(term, 0) + count * number
    return terms


def _recomputed(run: Run, placement: Placement, block: Block, layers: Number) -> Number:
    """Layer activations, of `layers` of one kind, that are checkpoints."""
    match run.layout.recompute:
        case "full":
            return layers
        case "blocks":
            # the first blocks of the rank, whatever their kind: those left over after the kinds before this one
            before: Number = 0
            for kind, count in placement.blocks:
                if kind is block:
                    mine = lesser(greater(run.layout.recompute_blocks - before, 0), count)
                    return floor_div(layers * mine, greater(count, 1))
                before = before + count
            return 0
        case _:
            return 0


def block_terms(run: Run, block: Block) -> Terms:
    """Bytes of one block's saved tensors of one micro-batch, by term."""
    key = ("terms", block.name, id(block))
    if key not in run.known:
        run.known[key] = _block_terms(run, block)
    terms: Terms = run.known[key]
    return terms


def _block_terms(run: Run, block: Block) -> Terms:
    selective = run.layout.recompute == "selective"
    imbalance = run.workload.expert_imbalance
    terms: Terms = {}
    for term, routed, polynomial in activation_polynomials(block, run.stack, run.precision, selective):
        number = polynomial(run.shape)
        if routed and imbalance != 1.0:
            number = ceil_div(number * round(imbalance * 1024), 1024)
        terms[term] = terms.get(term, 0) + number
    return terms


def backward_terms(run: Run, placement: Placement) -> Terms:
    """The working set of a block's backward; under recompute, the block's own tensors once more."""
    transient: Number = 0
    again: Number = 0
    for block, count in placement.blocks:
        present = where(count > 0, 1, 0)
        transient = greater(transient, _transient(run, block) * present)
        if run.layout.recompute in ("full", "blocks"):
            whole: Number = sum(block_terms(run, block).values())
            again = greater(again, (whole - input_polynomial(block, run.precision)(run.shape)) * present)
        elif run.layout.recompute == "selective":
            again = greater(again, _recomputed_in_backward(run, block) * present)
    if run.layout.recompute == "blocks":
        again = where(run.layout.recompute_blocks > 0, again, 0)
    return {"transient": transient, "activations/recomputed": again}


def _transient(run: Run, block: Block) -> Number:
    key = ("transient", id(block))
    if key not in run.known:
        worst: Number = 0
        for polynomial in backward_transients(block, run.stack, run.precision):
            worst = greater(worst, polynomial(run.shape))
        run.known[key] = worst
    return run.known[key]


def _recomputed_in_backward(run: Run, block: Block) -> Number:
    """What a block's backward makes again under selective recompute: all it would keep, less what it kept."""
    key = ("again", id(block))
    if key not in run.known:
        whole = [p(run.shape) for _, _, p in activation_polynomials(block, run.stack, run.precision, False)]
        run.known[key] = greater(sum(whole) - sum(block_terms(run, block).values()), 0)
    return run.known[key]
