"""Pieces of the models before Llama: plain two-matrix MLP, learned positions."""

from __future__ import annotations

from loadmaster.describe.families import ends
from loadmaster.describe.families.flow import Flow
from loadmaster.describe.op import OpKind, Split

__all__ = ["plain_mlp", "position_table"]


def plain_mlp(
    flow: Flow, x: str, *, width: int, inner: int, up: str, down: str, activation: str, bias: bool = True,
    transposed: bool = False, dropout: float = 0.0, name: str = "mlp",
) -> str:  # fmt: skip
    """down(dropout(act(up(x))))."""
    y = flow.linear(
        f"{name}.up", x, weight=up, d_in=width, d_out=inner, bias=bias, split="column", transposed=transposed
    )
    y = flow.pointwise(f"{name}.activation", OpKind.ACTIVATION, y, function=activation)
    y = flow.dropout(f"{name}.activation_dropout", y, dropout)
    return flow.linear(
        f"{name}.down", y, weight=down, d_in=inner, d_out=width, bias=bias, split="row", transposed=transposed
    )


def position_table(flow: Flow, x: str, weight: str, *, rows: int, trainable: bool = True) -> str:
    """x plus a row of a table for each position (the same for every sample)."""
    width = flow.values[x].width
    y = flow.value("positions", width, batch_power=0, split=Split.NONE)
    flow.op("positions", OpKind.POSITION, (), (y,), weights=(ends.table(weight, rows, width, trainable=trainable),))
    return flow.add("tokens.sum", x, y)
