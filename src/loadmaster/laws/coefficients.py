"""What a block asks of a device, as a few numbers: its products, attention cores, small-op traffic, parameters.

Read once from a block's op table and kept, so that pricing a layout touches numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from loadmaster.describe.model import Block, Model
from loadmaster.describe.op import Attention, Op, OpKind, Split

__all__ = ["BlockCoefficients", "Core", "ModelCoefficients", "Product", "coefficients"]

# kinds whose traffic is not a matter of reading and writing their values once
_TRACED_WIDTH = 128  # of a traced product without a weight: a head's
_NOT_ELEMENTWISE = (OpKind.MATMUL, OpKind.ATTENTION, OpKind.EMBEDDING, OpKind.LOSS, OpKind.CONV, OpKind.OTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix product: `rows` a token (or, `per_sample`, a sample), d_in to d_out, over experts.

    Attributes:
        split: ``column``, ``row`` or empty: which dim tensor parallelism divides.
        num_experts, top_k: copies, and copies a token visits.
    """

    rows: float
    d_in: int
    d_out: int
    split: str
    num_experts: int = 1
    top_k: int = 1
    per_sample: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """An attention core; `queries` a sample where that does not grow with the sequence (0: the sequence)."""

    attention: Attention
    queries: int
    split: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCoefficients:
    """Numbers of one block.

    Attributes:
        stream_elements, split_elements: read or written by small ops forward, a token: of values that are whole on
            every tp rank (or divided by sequence parallelism), of values that tp divides.
        reductions, backward_reductions: tensor-parallel all-reduces of the stream, forward and backward.
        exchanges: expert exchanges forward (dispatch and combine).
        num_ops: ops the host launches forward.
        split_params, whole_params: parameters that tp divides, that it does not; expert_params: of experts, which ep
            divides, and expert_split_params those of them that tp divides too.
        width: of the stream; top_k: experts a token visits.
        tokens: a sample that it sees, where the workload does not say (a ViT's patches, Whisper's frames), or 0.
    """

    products: tuple[Product, ...]
    cores: tuple[Core, ...]
    stream_elements: float
    split_elements: float
    reductions: int
    backward_reductions: int
    exchanges: int
    num_ops: int
    split_params: int
    whole_params: int
    expert_params: int
    expert_split_params: int
    width: int
    top_k: int
    tokens: int = 0

    def seq_len(self, workload_seq_len: int) -> int:
        """Tokens a sample that it sees."""
        return self.tokens or workload_seq_len


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCoefficients:
    """Numbers of a model: its distinct blocks with their counts, embedding and head."""

    blocks: tuple[tuple[BlockCoefficients, int], ...]
    embedding: BlockCoefficients
    head: BlockCoefficients
    num_layers: int
    vocab_size: int
    tied_params: int


_KEPT: dict[int, tuple[Model, ModelCoefficients]] = {}


def coefficients(model: Model) -> ModelCoefficients:
    """The model's numbers, made on first use."""
    kept = _KEPT.get(id(model))
    if kept is not None and kept[0] is model:
        return kept[1]
    counts: dict[int, list[int]] = {}
    distinct: list[Block] = []
    for block, repeat in model.blocks:
        # equal shapes under another index are one block for the laws; identity first, since comparing is slow
        index = next(
            (i for i, b in enumerate(distinct) if b is block or (b.name == block.name and b.ops == block.ops)), -1
        )
        if index < 0:
            distinct.append(block)
            index = len(distinct) - 1
        counts.setdefault(index, []).append(repeat)
    blocks = tuple((block_coefficients(b, model.seq_len_of(b, 0)), sum(counts[i])) for i, b in enumerate(distinct))
    tied = sum(w.numel for w in model.head.weights if w.tied_to)
    made = ModelCoefficients(
        blocks=blocks, embedding=block_coefficients(model.embedding, model.seq_len_of(model.embedding, 0)),
        head=block_coefficients(model.head, model.seq_len_of(model.head, 0)),
        num_layers=model.num_layers, vocab_size=model.vocab_size, tied_params=tied,
    )  # fmt: skip
    if len(_KEPT) > 64:
        _KEPT.clear()
    _KEPT[id(model)] = (model, made)
    return made


def block_coefficients(block: Block, tokens: int = 0) -> BlockCoefficients:
    """Walk the op table once; `tokens` a sample where the model fixes them."""
    products = tuple(p for op in block.ops if op.kind is not OpKind.EMBEDDING for p in _products(block, op))
    columns = {op.inputs[0] for op in block.ops for p in _products(block, op) if p.split == "column"}
    stream, split = _small_op_elements(block)
    dense = [w for w in block.weights if w.num_experts == 1]
    experts = [w for w in block.weights if w.num_experts > 1]
    return BlockCoefficients(
        products=products,
        cores=tuple(_core(block, op) for op in block.ops if op.attention is not None),
        stream_elements=stream, split_elements=split,
        reductions=sum(p.split == "row" and p.num_experts == 1 for p in products),
        backward_reductions=len(columns),
        exchanges=2 if any(p.num_experts > 1 for p in products) else 0,
        num_ops=len(block.ops),
        split_params=sum(w.num_params for w in dense if w.split is Split.TP),
        whole_params=sum(w.num_params for w in dense if w.split is not Split.TP),
        expert_params=sum(w.num_params for w in experts if w.split is not Split.TP),
        expert_split_params=sum(w.num_params for w in experts if w.split is Split.TP),
        width=block.value(block.output).width if block.values else 0,
        top_k=max((p.top_k for p in products), default=1),
        tokens=tokens,
    )  # fmt: skip


def _products(block: Block, op: Op) -> list[Product]:
    if op.kind is OpKind.EMBEDDING or op.attention is not None:
        return []
    if op.flops is not None:
        return _traced_product(op, op.flops)
    found = []
    for weight in op.weights:
        if not weight.multiplies or len(weight.shape) < 2:
            continue
        x, y = block.value(op.inputs[0]), block.value(op.outputs[0])
        split = "" if weight.split is not Split.TP else "column" if y.split is Split.TP else "row"
        inner = weight.shape[-1] * weight.shape[-2]
        rows = 1.0 if weight.num_experts > 1 else float(max(1, round((x.width * y.width / inner) ** 0.5)))
        # which of the two dims is d_in only matters to the bytes of activations; stored (out, in) unless it fits better
        d_in, d_out = weight.shape[-1], weight.shape[-2]
        if round(x.width / rows) == d_out != d_in:
            d_in, d_out = d_out, d_in
        found.append(Product(rows=rows, d_in=d_in, d_out=d_out, split=split, num_experts=weight.num_experts,
                             top_k=min(weight.top_k, weight.num_experts), per_sample=x.seq_power == 0))  # fmt: skip
    return found


def _traced_product(op: Op, flops: float) -> list[Product]:
    """One product a sample of a traced op's FLOPs, as wide as its matrix (a kernel's patches as inputs)."""
    if not flops:
        return []
    matrix = next((w for w in op.weights if len(w.shape) > 1), None)
    d_out, d_in = (matrix.shape[0], prod(matrix.shape[1:])) if matrix else (_TRACED_WIDTH, _TRACED_WIDTH)
    return [Product(rows=flops / (2 * d_in * d_out), d_in=d_in, d_out=d_out, split="", per_sample=True)]


def _core(block: Block, op: Op) -> Core:
    assert op.attention is not None
    q = block.value(op.inputs[0])
    queries = 0 if q.seq_power else round(q.width / (op.attention.num_heads * op.attention.head_dim))
    return Core(attention=op.attention, queries=queries, split=q.split is Split.TP)


def _small_op_elements(block: Block) -> tuple[float, float]:
    stream = split = 0.0
    for op in block.ops:
        if op.kind in _NOT_ELEMENTWISE:
            continue
        for name in (*op.inputs, *op.outputs):
            value = block.value(name)
            if value.seq_power != 1 or value.batch_power != 1:
                continue
            if value.split is Split.TP:
                split += value.width
            else:
                stream += value.width
    return stream, split
