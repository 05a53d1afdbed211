"""Parameters that a rank holds, by how parallelism divides them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from loadmaster.describe.model import Block, Model
from loadmaster.describe.op import OpKind, Split, Weight
from loadmaster.describe.stack import carries_adapter
from loadmaster.laws.numbers import Number, ceil_div, lesser, where
from loadmaster.laws.placement import Placement
from loadmaster.laws.run import Run
from loadmaster.program.codebook import is_coded

__all__ = [
    "Held", "WeightClass", "adapter_params", "block_params", "gathered_bytes", "has_tables", "held", "matrix_params",
    "rank_params", "weight_classes",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightClass:
    """Weights of a block that parallelism divides alike.

    Attributes:
        numel: elements of all of them; trainable: of those that are trained.
        split: tensor parallelism divides them, into at most `units` pieces (0: any number).
        expert: expert parallelism divides them. vocabulary: rows of a vocabulary of that many words (0: none).
        multiplies: the matrices of matrix products; coded: tensors whose moments 8-bit optimizers code.
    """

    numel: int
    trainable: int
    split: bool
    units: int
    expert: bool
    vocabulary: int = 0
    multiplies: bool = False
    coded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Parameters on one rank: dense ones and experts apart, since they are sharded over different ranks."""

    dense: Number = 0
    expert: Number = 0

    def __add__(self, other: Held) -> Held:
        return Held(dense=self.dense + other.dense, expert=self.expert + other.expert)

    def __mul__(self, count: Number) -> Held:
        return Held(dense=self.dense * count, expert=self.expert * count)

    def sharded(self, shards: Number, expert_shards: Number) -> Number:
        """Elements of one shard."""
        return ceil_div(self.dense, shards) + ceil_div(self.expert, expert_shards)

    @property
    def total(self) -> Number:
        """All of them."""
        return self.dense + self.expert


@lru_cache(maxsize=4096)
def weight_classes(block: Block, vocab_size: int, with_tied: bool = False) -> tuple[WeightClass, ...]:
    """A block's weights by how they are divided; tied ones only where the rank needs its own copy (`with_tied`)."""
    sums: dict[tuple[bool, int, bool, int, bool, bool], list[int]] = {}
    for kind, weight in [(op.kind, weight) for op in block.ops for weight in op.weights]:
        if weight.tied_to and not with_tied:
            continue
        one = weight.numel if weight.stacked else weight.numel // weight.num_experts
        coded = is_coded(one, is_embedding=kind in (OpKind.EMBEDDING, OpKind.POSITION) or weight.tied_to is not None)
        key = (weight.split is Split.TP, weight.split_units, weight.num_experts > 1, _vocabulary(weight, vocab_size),
               weight.multiplies, coded)  # fmt: skip
        pair = sums.setdefault(key, [0, 0])
        pair[0] += weight.numel
        pair[1] += weight.numel if weight.trainable else 0
    return tuple(
        WeightClass(
            numel=n,
            trainable=t,
            split=split,
            units=units,
            expert=expert,
            vocabulary=vocabulary,
            multiplies=multiplies,
            coded=coded,
        )
        for (split, units, expert, vocabulary, multiplies, coded), (n, t) in sums.items()
    )


def _vocabulary(weight: Weight, vocab_size: int) -> int:
    return vocab_size if weight.split is Split.TP and weight.shape[weight.split_dim] == vocab_size > 1 else 0


def held(
    classes: tuple[WeightClass, ...], *, tp: Number, ep: Number, expert_tp: Number, padded_vocab: Number,
    splits_vocab: bool = True, trainable: bool = False,
) -> Held:  # fmt: skip
    """Parameters of these classes on one rank.

    ``numel / tp`` for a split weight (at most as many pieces as it has heads), ``/ ep`` for experts; a vocabulary has
    `padded_vocab` rows.
    """
    dense: Number = 0
    expert: Number = 0
    for c in classes:
        numel: Number = c.trainable if trainable else c.numel
        if not numel:
            continue
        if c.vocabulary:
            numel = numel // c.vocabulary * padded_vocab
        if c.expert:
            part = ceil_div(numel, ep)
            expert = expert + (ceil_div(part, expert_tp) if c.split else part)
        elif c.split and (splits_vocab or not c.vocabulary):
            dense = dense + ceil_div(numel, lesser(tp, c.units) if c.units else tp)
        else:
            dense = dense + numel
    return Held(dense=dense, expert=expert)


def block_params(
    run: Run, block: Block, *, trainable: bool = False, with_tied: bool = False, coded: bool = False
) -> Held:
    """Parameters of one block on one rank, before any sharding over data ranks; `coded`: those with 8-bit moments."""
    trainable = trainable and has_tables(run.model)
    key = ("params", id(block), trainable, with_tied, coded)
    if key in run.known:
        found: Held = run.known[key]
        return found
    layout = run.layout
    classes = weight_classes(block, run.model.vocab_size, with_tied)
    run.known[key] = result = held(
        tuple(c for c in classes if c.coded) if coded else classes, tp=layout.tp, ep=layout.ep, expert_tp=layout.tp,
        padded_vocab=run.padded_vocab, trainable=trainable,
        splits_vocab=run.stack.splits_embedding or block is not run.model.embedding,
    )  # fmt: skip
    return result


@lru_cache(maxsize=256)
def has_tables(model: Model) -> bool:
    """Whether some parameters are fixed tables that take no gradient."""
    return any(not weight.trainable for block, _ in model.parts() for weight in block.weights)


def rank_params(run: Run, placement: Placement, *, trainable: bool = False, coded: bool = False) -> Held:
    """Parameters on a pipeline rank; a tied matrix has its own copy where embedding and head lie apart."""
    which = {"trainable": trainable, "coded": coded}
    total: Held = block_params(run, run.model.embedding, **which) * placement.embedding
    for block, count in placement.blocks:
        total = total + block_params(run, block, **which) * count
    apart = where(placement.embedding == 0, placement.head, 0)
    together: Number = placement.head - apart
    for tied, present in ((True, apart), (False, together)):
        total = total + block_params(run, run.model.head, with_tied=tied, **which) * present
    return total


def matrix_params(run: Run, placement: Placement) -> Held:
    """Elements of the blocks' matrices on a pipeline rank: what 4-bit quantisation of a frozen model covers."""
    total = Held()
    for block, count in placement.blocks:
        total = total + _matrices(run, block) * count
    return total


def _matrices(run: Run, block: Block) -> Held:
    classes = tuple(c for c in weight_classes(block, run.model.vocab_size) if c.multiplies)
    layout = run.layout
    return held(classes, tp=layout.tp, ep=layout.ep, expert_tp=layout.tp, padded_vocab=run.padded_vocab)


def gathered_bytes(run: Run, block: Block) -> Number:
    """Bytes of a whole block once gathered: in the compute dtype, frozen 4-bit matrices as they are."""
    elements = block_params(run, block).total
    if run.workload.frozen != "qlora":
        return elements * run.compute_bytes
    matrices = _matrices(run, block).total
    return (elements - matrices) * run.compute_bytes + ceil_div(matrices, 2) + ceil_div(matrices, 64)


def adapter_params(run: Run, placement: Placement) -> Held:
    """Elements of the adapters on a pipeline rank: ``rank * (d_in + d_out)`` a linear layer that carries one."""
    total: Number = 0
    for block, count in placement.blocks:
        total = total + _adapters(block, run.workload.lora_targets) * run.workload.lora_rank * count
    return Held(dense=total)


@lru_cache(maxsize=1024)
def _adapters(block: Block, targets: str) -> int:
    return sum(sum(w.shape) for op in block.ops if carries_adapter(op, targets) for w in op.weights if w.multiplies)
