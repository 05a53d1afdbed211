"""Where the step is: phase, module and op; in backward the autograd node tells which forward op it undoes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

from loadmaster.trace.timeline import Event

__all__ = ["Whereabouts"]

_current_node: Any = torch._C._current_autograd_node
_next_sequence: Any = torch._C._autograd._get_sequence_nr


class Whereabouts:
    """A clock that ticks once an op.

    Attributes:
        event: index of the op that runs now.
    """

    def __init__(self) -> None:
        self.event = 0
        self.phase = "setup"
        self.phases: list[tuple[str, int]] = [("setup", 0)]
        self.log: list[tuple[Any, str, str, int, bool]] = [("start", "setup", "", -1, False)]
        self.node_event: dict[int, int] = {}  # sequence number of an autograd node -> event of its forward op
        self._names: dict[int, str] = {}
        self._parameters: dict[int, str] = {}
        self._stack: list[str] = []
        self._last_sequence = -1
        self._backward = False

    @property
    def module(self) -> str:
        """Path of the innermost running module, or of the one whose backward runs."""
        return self._place()[0]

    def name(self, root: nn.Module) -> None:
        """Learn the paths of modules and parameters."""
        for path, module in root.named_modules():
            self._names.setdefault(id(module), path)
        for path, parameter in root.named_parameters():
            self._parameters[id(parameter)] = path.rpartition(".")[0]

    def advance(self, func: Any) -> None:
        """An op is about to run."""
        self.event += 1
        module, source, again = self._place()
        self.log.append((func, self.phase, module, source, again))
        sequence = _next_sequence() - 1
        if sequence != self._last_sequence:
            self._last_sequence = sequence
            self.node_event[sequence] = self.event

    def _place(self) -> tuple[str, int, bool]:
        """Module, event of the forward op (or -1), whether this is a recomputation."""
        if not self._backward:
            return (self._stack[-1] if self._stack else ""), -1, False
        if self._stack:
            return self._stack[-1], -1, True
        node = _current_node()
        if node is None:
            return "", -1, False
        source = self.node_event.get(node._sequence_nr(), -1)
        if source >= 0:
            return self.log[source][2], source, False
        variable = getattr(node, "variable", None)  # the node that accumulates a gradient
        return (self._parameters.get(id(variable), "") if variable is not None else ""), -1, False

    @contextmanager
    def during(self, phase: str, *, backward: bool = False) -> Iterator[None]:
        """Everything inside belongs to `phase`."""
        before = self.phase, self._backward
        self.phase, self._backward = phase, backward
        self.phases.append((phase, self.event + 1))
        try:
            yield
        finally:
            self.phase, self._backward = before

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear of every module's forward."""
        enter = hooks.register_module_forward_pre_hook(self._enter)
        leave = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            enter.remove()
            leave.remove()

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1] if self._stack else ""))

    def _leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._stack:
            self._stack.pop()

    def events(self) -> tuple[Event, ...]:
        """The log as values."""
        words: dict[Any, str] = {}
        made: list[Event] = []
        for index, (func, phase, module, source, again) in enumerate(self.log):
            op = words.get(func)
            if op is None:
                op = words[func] = str(func).removesuffix(".default")
            undone = words[self.log[source][0]] if source >= 0 else ""
            made.append(Event(index=index, phase=phase, module=module, op=op, source=undone, recompute=again))
        return tuple(made)
