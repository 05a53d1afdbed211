"""A block in the making: each call adds one op, names the value it makes and returns that name."""

from __future__ import annotations

from loadmaster.describe.model import Block
from loadmaster.describe.op import Attention, Op, OpKind, Split, Value, ValueType, Weight

__all__ = ["Flow"]


class Flow:
    """Collects the ops and values of one block.

    The residual stream is `Split.SEQUENCE` (divided by tp only under sequence parallelism), what lies between a
    column-split and a row-split matrix is `Split.TP`.

    Args:
        name, prefix: of the block.
        width: of its input value ``input``.

    >>> flow = Flow("decoder", "layers.{}.", width=8)
    >>> block = flow.done(flow.linear("up", "input", weight="up_proj", d_in=8, d_out=16, split="column"))
    >>> block.output, block.num_params, block.value("up").split.value
    ('up', 128, 'tp')
    """

    def __init__(self, name: str, prefix: str, *, width: int | None, batch_power: int = 1, seq_power: int = 1) -> None:
        self.name, self.prefix = name, prefix
        self.ops: list[Op] = []
        self.values: dict[str, Value] = {}
        if width is not None:
            self.value("input", width, split=Split.SEQUENCE, batch_power=batch_power, seq_power=seq_power)

    def value(
        self, name: str, width: int, *, split: Split = Split.NONE, type: ValueType = ValueType.COMPUTE,
        batch_power: int = 1, seq_power: int = 1, alias: str | None = None,
    ) -> str:  # fmt: skip
        """Name a value."""
        assert name not in self.values, name
        self.values[name] = Value(
            name=name, width=width, split=split, type=type, batch_power=batch_power, seq_power=seq_power, alias=alias
        )
        return name

    def op(
        self, name: str, kind: OpKind, inputs: tuple[str, ...], outputs: tuple[str, ...], *,
        weights: tuple[Weight, ...] = (), function: str = "", attention: Attention | None = None,
    ) -> str:  # fmt: skip
        """Add an op between values already named; the first output's name comes back."""
        self.ops.append(
            Op(name=name, kind=kind, inputs=inputs, outputs=outputs, weights=weights, function=function,
               attention=attention)
        )  # fmt: skip
        return outputs[0]

    def like(self, name: str, of: str, *, alias: str | None = None) -> str:
        """A value of the same shape and split as `of`."""
        v = self.values[of]
        return self.value(
            name, v.width, split=v.split, type=v.type, batch_power=v.batch_power, seq_power=v.seq_power, alias=alias
        )

    def linear(
        self, name: str, x: str, *, weight: str, d_in: int, d_out: int, bias: bool = False, split: str = "",
        units: int = 0, transposed: bool = False, tied_to: str | None = None, output: str | None = None,
        length: int | None = None,
    ) -> str:  # fmt: skip
        """y = x W (+ b).

        Args:
            name: of the op and of its output value.
            x: the input value.
            weight: state-dict name without ``.weight``.
            d_in, d_out: widths. transposed: stored (in, out), as GPT-2's Conv1D does.
            bias: whether it has one.
            split: ``column`` (outputs over tp), ``row`` (inputs over tp) or empty (whole).
            units: indivisible pieces along the split dim (heads).
            tied_to: full name of the weight it shares.
            output: name of its output value where that is not the op's.
            length: tokens a sample of x where that is fixed (x then has no power of seq_len).
        """
        matrix, vector = linear_weights(
            weight, d_in=d_in, d_out=d_out, bias=bias, split=split, units=units, transposed=transposed, tied_to=tied_to
        )
        v = self.values[x]
        kind = {"column": Split.TP, "row": Split.SEQUENCE, "": Split.NONE}[split]
        y = self.value(
            output or name, d_out * (length or 1), split=kind, batch_power=v.batch_power, seq_power=v.seq_power
        )
        return self.op(name, OpKind.MATMUL, (x,), (y,), weights=(matrix, *vector))

    def norm(
        self, name: str, x: str, *, weight: str, function: str = "rms", bias: bool = False, width: int | None = None,
        affine: bool = True, output: str | None = None,
    ) -> str:  # fmt: skip
        """Layer or root-mean-square norm over the last `width` elements (the value's whole width where None)."""
        width = self.values[x].width if width is None else width
        weights = [Weight(name=f"{weight}.weight", shape=(width,))] if affine else []
        if bias:
            weights.append(Weight(name=f"{weight}.bias", shape=(width,)))
        y = self.like(output or name, x)
        return self.op(name, OpKind.NORM, (x,), (y,), weights=tuple(weights), function=function)

    def pointwise(self, name: str, kind: OpKind, *xs: str, function: str = "", output: str | None = None) -> str:
        """An op whose output has the shape of its first input: activation, product, sum, scale, softcap."""
        y = self.like(output or name, xs[0])
        return self.op(name, kind, xs, (y,), function=function)

    def dropout(self, name: str, x: str, rate: float) -> str:
        """Dropout; nothing at rate 0."""
        return self.pointwise(name, OpKind.DROPOUT, x, function=f"{rate:g}") if rate else x

    def add(self, name: str, x: str, y: str) -> str:
        """The residual sum; its shape is the first's."""
        return self.pointwise(name, OpKind.ADD, x, y)

    def attention(
        self, name: str, inputs: tuple[str, ...], core: Attention, *, function: str = "sdpa", split: bool = True
    ) -> str:
        """softmax(q k^T) v; inputs are q, k, v and what is added to the scores."""
        q = self.values[inputs[0]]
        y = self.value(
            name, core.num_heads * core.v_head_dim, split=Split.TP if split else Split.NONE,
            batch_power=q.batch_power, seq_power=q.seq_power,
        )  # fmt: skip
        return self.op(name, OpKind.ATTENTION, inputs, (y,), function=function, attention=core)

    def done(self, output: str, *, input: str = "input", first_index: int = 0) -> Block:
        """The finished block."""
        return Block(
            name=self.name, prefix=self.prefix, ops=tuple(self.ops), values=tuple(self.values.values()),
            input=input, output=output, first_index=first_index,
        )  # fmt: skip


def linear_weights(
    weight: str, *, d_in: int, d_out: int, bias: bool, split: str, units: int, transposed: bool = False,
    tied_to: str | None = None, num_experts: int = 1, top_k: int = 1,
) -> tuple[Weight, tuple[Weight, ...]]:  # fmt: skip
    """The matrix and (perhaps) the bias of a linear layer with their tensor-parallel splits."""
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    matrix = Weight(
        name=f"{weight}.weight", shape=(d_in, d_out) if transposed else (d_out, d_in), multiplies=True,
        split=Split.TP if split else Split.NONE, split_dim=in_dim if split == "row" else out_dim, split_units=units,
        tied_to=tied_to, num_experts=num_experts, top_k=top_k,
    )  # fmt: skip
    if not bias:
        return matrix, ()
    column = split == "column"
    vector = Weight(
        name=f"{weight}.bias", shape=(d_out,), split=Split.TP if column else Split.NONE,
        split_units=units if column else 0, num_experts=num_experts, top_k=top_k,
    )  # fmt: skip
    return matrix, (vector,)
