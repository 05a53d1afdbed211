"""The state of a rank, line by line as its stack keeps it: weights, gradients, masters, moments, buffers, scratch."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from loadmaster.describe.model import Block, Model
from loadmaster.describe.op import OpKind, Split
from loadmaster.describe.precision import BYTES
from loadmaster.describe.stack import Alive, StateLine
from loadmaster.describe.workload import OPTIMIZERS
from loadmaster.laws.borrowed import borrowed_terms
from loadmaster.laws.numbers import Number, ceil_div, greater, lesser, where
from loadmaster.laws.placement import Placement
from loadmaster.laws.run import Run
from loadmaster.laws.state import Held, adapter_params, has_tables, matrix_params, rank_params
from loadmaster.program.codebook import DEFAULT_BLOCK
from loadmaster.units import KIB, MIB

__all__ = ["state_lines", "trained_params", "whole_state"]

Terms = dict[str, Number]


_GROUPED_STREAMS = 4  # transformer_engine/pytorch/module/base.py: get_multi_stream_cublas_workspace
# what an optimizer with one moment calls it
_ONLY_MOMENT = {"sgd_momentum": "optimizer/momentum", "adagrad": "optimizer/sum"}


def state_lines(run: Run, params: Held, alive: Alive) -> Terms:
    """Bytes of the lines that exist at `alive`."""
    terms: Terms = {}
    for line in run.stack.state:
        if line.alive is alive:
            name = line.term
            if name == "optimizer/exp_avg":
                name = _ONLY_MOMENT.get(run.workload.optimizer, name)
            terms[name] = terms.get(name, 0) + _line_bytes(run, line, params)
    return terms


def _coded_moments(run: Run, terms: Terms, trained: Held, coded: Held) -> Terms:
    """The same with 8-bit moments where the layout asks for them.

    A coded element takes one byte, and each block of 256 one fp32 scale; the rest keeps 4 bytes:
    ``coded + 4 (trained - coded)`` a moment and ``4 ceil(coded / 256)`` of scales.
    """
    eight = run.layout.optimizer_bits == 8
    names = [n for n in ("optimizer/exp_avg", "optimizer/exp_avg_sq", *_ONLY_MOMENT.values()) if n in terms]
    sharded = run.layout.zero >= 1
    elements = where(sharded, trained.sharded(run.shards, run.expert_shards), trained.total)
    codes = where(sharded, coded.sharded(run.shards, run.expert_shards), coded.total)
    held = where(run.layout.offload_optimizer, 0, 1)
    kept = [n for n in names if isinstance(terms[n], np.ndarray) or terms[n]]
    for name in kept:
        terms[name] = where(eight, (codes + 4 * (elements - codes)) * held, terms[name])
    terms["optimizer/scales"] = where(eight, len(kept) * 4 * ceil_div(codes, DEFAULT_BLOCK) * held, 0)
    return terms


def trained_params(run: Run, placement: Placement, params: Held) -> Held:
    """Parameters that have gradients and moments: all but fixed tables, or the adapters of a frozen model."""
    if run.workload.frozen != "none":
        return adapter_params(run, placement)
    return rank_params(run, placement, trainable=True) if has_tables(run.model) else params


def _frozen_weights(run: Run, placement: Placement, params: Held, adapters: Held) -> Number:
    """Bytes of a frozen model and its fp32 adapters.

    4-bit: half a byte an element of the blocks' matrices, and a one-byte scale for each 64 of them (double
    quantisation; Dettmers et al. 2023, arXiv 2305.14314, section 3).
    """
    size = BYTES[run.precision.param]

    def shared(held: Held) -> Number:
        return where(run.layout.zero >= 3, held.sharded(run.shards, run.expert_shards), held.total)

    frozen = shared(params) * size
    if run.workload.frozen == "qlora":
        matrices = shared(matrix_params(run, placement))
        frozen = frozen - matrices * size + ceil_div(matrices, 2) + ceil_div(matrices, 64)
    return frozen + shared(adapters) * 4


def _whole_parameters(run: Run, params: Held, trained: Held) -> Number:
    """Bytes of the parameters that are not trained (fixed tables), which the line of trained ones leaves out."""
    rest = Held(dense=params.dense - trained.dense, expert=params.expert - trained.expert)
    whole = where(run.layout.zero >= 3, rest.sharded(run.shards, run.expert_shards), rest.total)
    return whole * BYTES[run.precision.param]


def whole_state(run: Run, params: Held, placement: Placement) -> Terms:
    """What exists throughout the step: lines, gradients kept whole over a window, scratch of the matrix libraries."""
    trained = trained_params(run, placement, params)
    terms = state_lines(run, trained, Alive.ALWAYS)
    if params is not trained:
        terms["parameters"] = terms.get("parameters", 0) + _whole_parameters(run, params, trained)
    if run.workload.frozen == "none":
        if np.any(run.layout.optimizer_bits == 8):
            coded = rank_params(run, placement, trainable=True, coded=True)
            terms = _coded_moments(run, terms, trained, coded)
    else:
        terms["parameters"] = _frozen_weights(run, placement, params, trained)
    if run.stack.retains_unsharded:
        whole = trained.total * BYTES[run.precision.reduce]
        retained = (run.layout.zero >= 2) & (run.micro_batches > 1) & (run.layout.reduce_each_micro_batch == 0)
        terms["gradients"] = where(retained, greater(whole, terms["gradients"]), terms["gradients"])
    number, size = run.stack.buckets
    if number:
        held = lesser(trained.total, size) * number * BYTES[run.precision.grad] * where(run.layout.zero >= 1, 1, 0)
        terms["buffers/buckets"] = terms.get("buffers/buckets", 0) + held
    terms |= borrowed_terms(run, params, placement)
    terms["buffers/workspace"] = _workspace(run)
    if run.stack.scratch_gradients:
        terms["buffers/weight_gradients"] = _scratch_gradients(run, placement)
    return terms


def _line_bytes(run: Run, line: StateLine, params: Held) -> Number:
    """``parameters on the rank * bytes each / shards``, where the ZeRO stage shards this line."""
    each = line.bytes_each(run.precision) * _moment_kept(run, line)
    if each and run.workload.frozen != "none" and line.term != "parameters":
        each = 0 if line.dtype == "master" else 4  # adapters are fp32
    if not each:
        return 0
    whole: Number = params.total
    if line.zero is not None:
        sharded = params.sharded(run.shards, run.expert_shards)
        whole = where(run.layout.zero >= line.zero, sharded, whole)
    if line.term.startswith("optimizer/"):
        whole = where(run.layout.offload_optimizer, 0, whole)
    return whole * each * _exists(run, line.when)


def _moment_kept(run: Run, line: StateLine) -> int:
    """0 for a moment that the optimizer does not have."""
    moments = OPTIMIZERS[run.workload.optimizer]
    return int(not ((line.term == "optimizer/exp_avg_sq" and moments < 2) or
                    (line.term == "optimizer/exp_avg" and moments < 1)))  # fmt: skip


def _exists(run: Run, when: str) -> Number:
    """1 where the line exists, else 0."""
    layout = run.layout
    found: Number = 1
    for name in filter(None, when.split("+")):
        match name:
            case "zero0":
                test = layout.zero == 0
            case "zero1":
                test = (layout.zero >= 1) & (run.shards > 1)
            case "unpiped":
                test = layout.pp == 1
            case _:
                assert name == "replicas", name
                test = layout.dp_replicate * layout.dp_shard > 1
        found = found * where(test, 1, 0)
    return found


def _workspace(run: Run) -> int:
    """Scratch of the matrix libraries, which the allocator counts.

    PyTorch keeps one cuBLAS workspace a thread that multiplies (forward's and autograd's): 8.125 MiB before Hopper, 32
    MiB from Hopper on (``aten/src/ATen/cuda/CublasHandlePool.cpp``); a stack's own library adds its own,
    and one for each stream that multiplies groups of experts.
    """
    if run.on_cpu:
        return 0
    each = 32 * MIB if run.hopper or run.stack.deterministic else 8 * MIB + 128 * KIB
    own = run.stack.workspace[run.hopper]
    return 2 * each + own * (1 + _GROUPED_STREAMS * _has_experts(run.model))


@lru_cache(maxsize=256)
def _has_experts(model: Model) -> bool:
    return any(weight.num_experts > 1 for block, _ in model.blocks for weight in block.weights)


def _scratch_gradients(run: Run, placement: Placement) -> Number:
    """One weight-gradient tensor for each distinct matrix shape of the rank's blocks (one expert stands for all)."""
    rows: dict[tuple[int, ...], list[Any]] = {}  # shape -> bytes of one, layers of each kind that has it
    for block, count in placement.blocks:
        for shape, numel, split in _matrices(block):
            rows.setdefault(shape, [ceil_div(numel, run.layout.tp) if split else numel, 0])[1] += count
    elements: Number = sum(numel * where(count > 0, 1, 0) for numel, count in rows.values())
    return elements * run.compute_bytes


@lru_cache(maxsize=4096)
def _matrices(block: Block) -> tuple[tuple[tuple[int, ...], int, bool], ...]:
    """(shape, elements, split) of the block's matrices; those that read one value are one fused matrix."""
    fused: dict[str, list[Any]] = {}
    for op in block.ops:
        for weight in op.weights:
            if weight.multiplies and op.kind is OpKind.MATMUL:
                key = f"{op.inputs[0]}/{weight.split_dim}"
                row = fused.setdefault(key, [0, weight.shape[1 - weight.split_dim], 0, weight.split is Split.TP])
                row[0] += weight.shape[weight.split_dim]
                row[2] += math.prod(weight.shape)
    return tuple(((rows, columns), numel, split) for rows, columns, numel, split in fused.values())
