"""A module's parameters for the engine: its blocks, its table, its dtype, and rank 0's values on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loadmaster.describe.precision import Precision
from loadmaster.program.params import EMBEDDING, HEAD, Parameter, ParameterTable
from loadmaster.runtime.mesh import Axis

__all__ = ["DTYPES", "broadcast", "cast_parameters", "find_blocks", "parameter_table"]

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated layers: the longest ModuleList (or Sequential) of layers of one class that hold parameters."""
    best: list[nn.Module] = []
    for part in module.modules():
        if not isinstance(part, nn.ModuleList | nn.Sequential):
            continue
        layers = list(part)
        same = len({type(layer) for layer in layers}) == 1 and any(True for _ in layers[0].parameters())
        if layers and same and len(layers) > len(best) and any(True for _ in layers[0].children()):
            best = layers
    return best


def parameter_table(module: nn.Module, blocks: Sequence[nn.Module]) -> tuple[ParameterTable, dict[str, Tensor]]:
    """Rows in the module's order and the tensors by name.

    A parameter that two blocks share, or a block and what lies outside, counts as outside. Outside, what the module
    registers before its first block is embedding, the rest head.
    """
    layers = _layers(module, blocks)
    rows: list[Parameter] = []
    named: dict[str, Tensor] = {}
    outside = EMBEDDING
    for name, param in module.named_parameters():
        found = layers.get(id(param), set())
        layer = next(iter(found)) if len(found) == 1 else outside
        outside = HEAD if found else outside
        named[name] = param
        rows.append(
            Parameter(
                name=name, shape=tuple(param.shape), layer=layer,
                trainable=param.requires_grad, group=str(param.dtype).removeprefix("torch."),
            )
        )  # fmt: skip
    return ParameterTable(tuple(rows)), named


def _layers(module: nn.Module, blocks: Sequence[nn.Module]) -> dict[int, set[int]]:
    """Parameter id to the blocks it is in; `EMBEDDING` stands for outside them."""
    found: dict[int, set[int]] = {}
    for i, block in enumerate(blocks):
        for param in block.parameters():
            found.setdefault(id(param), set()).add(i)
    inside = {id(part) for block in blocks for part in block.modules()}
    for part in module.modules():
        if id(part) not in inside:
            for param in part.parameters(recurse=False):
                if id(param) in found:
                    found[id(param)].add(EMBEDDING)
    return found


def cast_parameters(module: nn.Module, precision: Precision) -> None:
    """Cast parameters, not buffers: positions and frequencies stay in fp32."""
    if precision.param in ("bf16", "fp16"):
        for param in module.parameters():
            if param.is_floating_point():
                param.data = param.data.to(DTYPES[precision.param])


def broadcast(module: nn.Module, data: Axis) -> None:
    """Every rank starts from rank 0's weights and buffers."""
    if data.group is not None:
        for tensor in [*module.parameters(), *module.buffers()]:
            source = tensor.detach().contiguous()
            dist.broadcast(source, group=data.group, group_src=0)
            if source.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(source)
