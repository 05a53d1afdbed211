"""One stage of a pipeline over its schedule: its layers alone, micro-batches in the order of the schedule's table.

What the neighbours send is a received buffer; what they would do with the stage's output is a gradient of its size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from loadmaster.describe.layout import Layout
from loadmaster.errors import InvalidInput
from loadmaster.program.schedule import build_schedule
from loadmaster.program.stages import balanced_split
from loadmaster.trace.recompute import repeated_blocks
from loadmaster.trace.saved import saved_tensors_watched
from loadmaster.trace.step import StepPlan, autocast, default_loss, mark
from loadmaster.trace.timeline import Category
from loadmaster.trace.tracer import Tracer

__all__ = ["PipelineStage", "cut_stage"]


class _Received(nn.Module):
    """In place of the embedding: what the stage before sends."""

    def __init__(self, width: int, dtype: torch.dtype, tracer: Tracer) -> None:
        super().__init__()
        self.width, self.dtype, self.tracer = width, dtype, tracer

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """A buffer as large as the stream."""
        buffer = torch.empty(*ids.shape, self.width, dtype=self.dtype)
        mark(self.tracer, [("received", buffer)], Category.COMMUNICATION, "buffers/communication")
        return buffer.requires_grad_()


class _Nothing(nn.Module):
    """In place of positions on a later stage: adds nothing."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """Zero."""
        return torch.zeros(())


class _Same(nn.Module):
    """In place of norms and heads on an earlier stage."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As it is."""
        return x


def cut_stage(module: nn.Module, layout: Layout, stage: int, tracer: Tracer, dtype: torch.dtype) -> None:
    """Leave only what `stage` holds, in place.

    Raises:
        InvalidInput: no single list of layers between one embedding and the rest, or too few layers.
    """
    lists = repeated_blocks(module)
    find: Any = getattr(module, "get_input_embeddings", None)
    embedding = find() if find is not None else None
    if len(lists) != 1 or not isinstance(embedding, nn.Embedding):
        raise InvalidInput(
            "layout.pp", layout.pp, "needs a module with one list of layers after one token embedding",
            "trace the stage's own module with pp=1",
        )  # fmt: skip
    path, blocks = lists[0]
    if layout.pp > len(blocks) or not 0 <= stage < layout.pp:
        raise InvalidInput("stage", stage, f"of pp={layout.pp} has no layer of {len(blocks)}", "use fewer stages")
    counts = balanced_split(len(blocks), layout.pp)
    start = sum(counts[:stage])
    _replace(module, path, nn.ModuleList(blocks[start : start + counts[stage]]))
    owned = [p for p, m in module.named_modules() if any(True for _ in m.parameters(recurse=False))]
    outside = [p for p in owned if not p.startswith(f"{path}.")]
    width = embedding.embedding_dim
    for name in outside:
        child = module.get_submodule(name)
        if isinstance(child, nn.Embedding):
            if stage > 0:
                _replace(module, name, _Received(width, dtype, tracer) if child is embedding else _Nothing())
        elif stage < layout.pp - 1:
            _replace(module, name, _Same())


def _replace(module: nn.Module, path: str, new: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, new)


class PipelineStage:
    """Runs the micro-batches of one step through the stage."""

    def __init__(self, module: nn.Module, layout: Layout, stage: int, micro_batches: int, plan: StepPlan) -> None:
        self.module, self.plan = module, plan
        self.last = stage == layout.pp - 1
        schedule = build_schedule(layout.schedule, pp=layout.pp, num_micro_batches=micro_batches)
        self.actions = schedule.actions[stage]

    def run(self, tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any], suffix: str) -> None:
        """Every action in order; each is a phase's part."""
        outputs: dict[int, torch.Tensor] = {}
        given = kwargs if self.last else {k: v for k, v in kwargs.items() if k != "labels"}
        for action in self.actions:
            if action.kind == "F":
                with tracer.where.during("forward" + suffix), saved_tensors_watched(tracer):
                    outputs[action.micro_batch] = self._forward(args, given)
            else:
                with tracer.where.during("backward" + suffix, backward=True), saved_tensors_watched(tracer):
                    self._backward(tracer, outputs.pop(action.micro_batch))

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        with autocast(self.plan.autocast):
            output = self.module(*args, **kwargs)
            return (self.plan.loss or default_loss)(output) if self.last else _stream(output)

    def _backward(self, tracer: Tracer, output: torch.Tensor) -> None:
        if self.last:
            output.backward()  # type: ignore[no-untyped-call]
            return
        gradient = torch.empty_like(output)
        mark(tracer, [("received gradient", gradient)], Category.COMMUNICATION, "buffers/communication")
        torch.autograd.backward(output, gradient)


def _stream(output: Any) -> torch.Tensor:
    """The tensor a stage sends on."""
    stream = output.logits if hasattr(output, "logits") else output[0] if isinstance(output, tuple) else output
    assert isinstance(stream, torch.Tensor)
    return stream
