"""A model as tables of ops: an embedding, repeated blocks, a head; every count is exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

from loadmaster.describe.op import Attention, Op, OpKind, Value, Weight

__all__ = ["Block", "Model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Ops in order and the values that flow between them.

    Attributes:
        name: ``decoder``, ``moe``, ``embedding``, ``head``, ...
        prefix: where its weights lie in the state dict; ``{}`` stands for the layer's index.
        first_index: index of its first repeat under `prefix` (DeepSeek's MoE layers start at 1 or 3).
        input, output: boundary values (the residual stream), the tensors a pipeline sends and a checkpoint keeps.
    """

    name: str
    prefix: str
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    input: str
    output: str
    first_index: int = 0

    def __post_init__(self) -> None:
        known = {v.name for v in self.values}
        assert len(known) == len(self.values), f"{self.name}: a value is named twice"
        for op in self.ops:
            missing = [v for v in (*op.inputs, *op.outputs) if v not in known]
            assert not missing, f"{self.name}.{op.name}: unknown values {missing}"

    def __hash__(self) -> int:
        # the laws cache by block: what tells blocks apart, without hashing the whole table each time
        shapes = tuple(op.weights[0].shape for op in self.ops if op.weights)
        return hash((self.name, self.prefix, self.first_index, len(self.values), shapes))

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Every weight, in op order."""
        return tuple(w for op in self.ops for w in op.weights)

    @property
    def num_params(self) -> int:
        """Parameters it adds."""
        return sum(w.num_params for w in self.weights)

    def value(self, name: str) -> Value:
        """The value called `name`."""
        return next(v for v in self.values if v.name == name)

    @property
    def attention(self) -> Attention | None:
        """Its (first) attention core."""
        return next((op.attention for op in self.ops if op.kind is OpKind.ATTENTION), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is trained.

    Attributes:
        name: as the user wrote it.
        family: model_type of its config, or ``traced``.
        hidden_size: width of the residual stream; vocab_size: of the embedding, unpadded.
        embedding, blocks, head: blocks are (block, repeat) in execution order.
        max_seq_len: longest sequence that a table of positions allows; None for rotary, ALiBi and relative ones.
        fixed_seq_len: tokens a sample whatever the workload says (a ViT), or None.
        encoder_seq_len: tokens of the encoder a sample (Whisper's 1500), None: as the workload says.
    """

    name: str
    family: str
    hidden_size: int
    vocab_size: int
    embedding: Block
    blocks: tuple[tuple[Block, int], ...]
    head: Block
    max_seq_len: int | None = None
    fixed_seq_len: int | None = None
    encoder_seq_len: int | None = None

    def __hash__(self) -> int:
        repeats = tuple(repeat for _, repeat in self.blocks)
        return hash((self.name, self.family, self.hidden_size, self.vocab_size, repeats))

    @classmethod
    def from_hf(cls, source: str | PathLike[str] | dict[str, Any]) -> Model:
        """Read a Hugging Face config: a catalogue name, a path to config.json or its folder, or a dict.

        Raises:
            InvalidInput: unknown name, missing or absurd field, unknown model type without the runtime.
        """
        from loadmaster.describe.families import from_hf

        return from_hf(source)

    def parts(self) -> Iterator[tuple[Block, int]]:
        """Embedding, blocks, head with their repeats."""
        yield self.embedding, 1
        yield from self.blocks
        yield self.head, 1

    @property
    def num_layers(self) -> int:
        """Blocks between embedding and head."""
        return sum(repeat for _, repeat in self.blocks)

    @property
    def num_params(self) -> int:
        """Unique parameters, fixed tables included, a tied matrix once."""
        return sum(b.num_params * n for b, n in self.parts())

    @property
    def num_trainable_params(self) -> int:
        """Parameters less fixed tables."""
        return sum(w.num_params * n for b, n in self.parts() for w in b.weights if w.trainable)

    @property
    def num_active_params(self) -> int:
        """Parameters less the routed experts that a token does not visit."""
        return sum(w.num_active * n for b, n in self.parts() for w in b.weights)

    @property
    def matmul_params(self) -> int:
        """Elements of every matrix that multiplies a token: the look-up none, the head once, experts top-k times."""
        return sum(w.matmul_params * n for b, n in self.parts() for w in b.weights)

    def layer_blocks(self) -> tuple[Block, ...]:
        """One block a layer, in order."""
        return tuple(block for block, repeat in self.blocks for _ in range(repeat))

    def seq_len_of(self, block: Block, seq_len: int) -> int:
        """Tokens a sample that `block` sees: fixed for a ViT and for Whisper's encoder, else the workload's."""
        if self.fixed_seq_len is not None:
            return self.fixed_seq_len
        if block.name.startswith("encoder") and self.encoder_seq_len is not None:
            return self.encoder_seq_len
        return seq_len

    def named_weights(self) -> Iterator[tuple[str, Weight]]:
        """Every weight of every layer under its full state-dict name.

        An unstacked expert weight is named once, with ``*`` for the expert's index.
        """
        for block, repeat in self.parts():
            for i in range(repeat):
                for weight in block.weights:
                    yield block.prefix.format(block.first_index + i) + weight.name, weight
