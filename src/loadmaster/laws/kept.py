"""Activations that a rank keeps for the micro-batches in flight, under the layout's recompute mode."""

from __future__ import annotations

from loadmaster.describe.model import Block
from loadmaster.laws.activations import activation_polynomials, input_polynomial
from loadmaster.laws.numbers import Number, ceil_div, floor_div, greater, lesser
from loadmaster.laws.placement import Placement
from loadmaster.laws.run import Run

__all__ = ["block_terms", "checkpointed_layers", "kept_terms"]

Terms = dict[str, Number]


def kept_terms(run: Run, placement: Placement, in_flight: list[Number]) -> Terms:
    """Saved tensors of all chunk activations in flight; `in_flight` counts them chunk by chunk.

    ``sum over chunks of micro-batches * layers * bytes a layer``; a recomputed layer keeps its input only.
    """
    terms: Terms = {}
    for k, block in enumerate(placement.kinds):
        layers: Number = sum(n * chunk[k] for n, chunk in zip(in_flight, placement.chunks, strict=True))
        recomputed = checkpointed_layers(run, placement, block, layers)
        for term, number in block_terms(run, block).items():
            terms[term] = terms.get(term, 0) + (layers - recomputed) * number
        if run.layout.recompute in ("full", "blocks"):
            name = "activations/checkpoint"
            number = input_polynomial(block, run.precision, run.stack)(run.shape)
            terms[name] = terms.get(name, 0) + recomputed * number
    first = in_flight[0] * placement.embedding
    for block, count in ((run.model.embedding, first), (run.model.head, placement.head)):
        for term, number in block_terms(run, block).items():
            terms[term] = terms.get(term, 0) + count * number
    return terms


def checkpointed_layers(run: Run, placement: Placement, block: Block, layers: Number) -> Number:
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
