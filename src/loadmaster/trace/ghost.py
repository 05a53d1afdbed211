"""Ghost tensors: shape, strides and an exact storage, but no data; what an op makes of them is remembered.

A ghost is a meta tensor that answers ``cpu`` when asked for its device, so that autograd, autocast and the choice of
attention kernel are those of a real run. What an op returns for given metadata is asked once of PyTorch's own fake
tensors (the oracle) and kept as a `Plan`: new storages, views of arguments, arguments themselves. A plan is applied
in some ten microseconds, so that every op of every layer is really executed and nothing has to be extrapolated.
Ghosts are no `FakeTensor`s: code that asks whether it is being traced takes the branch it takes in a real run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from loadmaster.trace.kernels import MAX_KERNEL_BYTES, asks_kernel, corrected

__all__ = ["CPU", "Ghost", "Plan", "Plans", "as_meta", "ghost_of", "metadata_key", "shared_plans", "tensors_in"]

CPU = torch.device("cpu")
_DEVICE = torch.ops.prim.device.default
_META = torch.device("meta")


class _Kernel:
    """Whether a meta kernel runs now (ghosts then admit to be meta)."""

    running = False


class Ghost(torch.Tensor):
    """A tensor without data.

    Attributes:
        value: its real elements where they are known (small integers, masks, step counters), else None.
    """

    value: torch.Tensor | None = None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Only reached outside a trace, or while a meta kernel asks for the device."""
        if func is _DEVICE:
            return _META if _Kernel.running else CPU
        raise RuntimeError(f"{func}: a traced tensor has no data and lives in its trace only")

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """What code under trace is told."""
        return _META if _Kernel.running else CPU

    def tolist(self) -> Any:
        """The elements, where they are known."""
        if self.value is None:
            self.sum().item()  # refused by the tracer, which names module and op
        assert self.value is not None
        return self.value.tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Ghost({self.dtype}, {tuple(self.shape)})"


def ghost_of(elem: torch.Tensor) -> Ghost:
    """Dress a meta tensor as a ghost (it keeps the storage)."""
    make: Any = torch.Tensor._make_subclass
    made: Ghost = make(Ghost, elem, False, dispatch_device=True, device_for_backend_keys=CPU)
    return made


@contextmanager
def as_meta() -> Iterator[None]:
    """Run kernels on the ghosts' own metadata: for ops that change it in place, such as ``resize_``."""
    before = _Kernel.running
    with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
        torch._C._set_meta_in_tls_dispatch_include(True)
        _Kernel.running = True
        try:
            yield
        finally:
            _Kernel.running = before


def tensors_in(tree: Any, found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every tensor in nested tuples, lists and dicts, appended to `found`."""
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, list | tuple):
        for item in tree:
            tensors_in(item, found)
    elif isinstance(tree, dict):
        for item in tree.values():
            tensors_in(item, found)
    return found


def metadata_key(tree: Any, found: list[torch.Tensor]) -> Any:
    """A hashable image of arguments in which tensors stand for their metadata; the tensors are appended to `found`."""
    if isinstance(tree, torch.Tensor):
        found.append(tree)
        return tree.dtype, tree.shape, tree.stride(), tree.storage_offset()
    if isinstance(tree, list | tuple):
        return tuple([metadata_key(item, found) for item in tree])
    if isinstance(tree, dict):
        return tuple([(name, metadata_key(item, found)) for name, item in tree.items()])
    return tree.__class__, tree


@dataclass(slots=True, frozen=True)
class _New:
    """An output on a storage of its own; `group` tells outputs that share one."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage_bytes: int
    group: int
    plain: bool


@dataclass(slots=True, frozen=True)
class _View:
    """An output on the storage of argument `arg`."""

    arg: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True, frozen=True)
class _Same:
    """The argument itself."""

    arg: int


@dataclass(slots=True, frozen=True)
class _Constant:
    """No tensor."""

    value: object


class Plan:
    """What an op returns for given metadata."""

    __slots__ = ("container", "outputs")

    def __init__(self, container: type | None, outputs: tuple[Any, ...]) -> None:
        self.container, self.outputs = container, outputs

    def make(self, tensors: list[torch.Tensor], born: list[Ghost]) -> Any:
        """Build the outputs from the argument tensors; ghosts on new storages are appended to `born`."""
        groups: dict[int, torch.Tensor] = {}
        made: list[Any] = []
        for output in self.outputs:
            kind = output.__class__
            if kind is _New:
                elem = _new(output, groups)
                ghost = ghost_of(elem)
                born.append(ghost)
                made.append(ghost)
            elif kind is _View:
                storage = tensors[output.arg].untyped_storage()
                elem = torch.empty(0, dtype=output.dtype, device="meta")
                elem.set_(storage, output.offset, output.shape, output.stride)
                made.append(ghost_of(elem))
            elif kind is _Same:
                made.append(tensors[output.arg])
            else:
                made.append(output.value)
        if self.container is None:
            return made[0]
        return self.container(made)


def _new(output: _New, groups: dict[int, torch.Tensor]) -> torch.Tensor:
    if output.plain:
        return torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device="meta")
    base = groups.get(output.group)
    if base is None:
        base = groups[output.group] = torch.empty(output.storage_bytes, dtype=torch.uint8, device="meta")
    elem = torch.empty(0, dtype=output.dtype, device="meta")
    elem.set_(base.untyped_storage(), output.offset, output.shape, output.stride)
    return elem


class Plans:
    """The memory of what ops return, filled by asking fake tensors."""

    def __init__(self) -> None:
        self.known: dict[Any, Plan] = {}
        self.oracle = FakeTensorMode(allow_non_fake_inputs=True)

    def find(self, func: Any, key: Any, args: Any, kwargs: Any) -> Plan:
        """The plan for `func` on arguments of this metadata.

        Raises:
            what FakeTensorMode raises for ops whose result depends on data, or that have no fake rule.
        """
        full = (func, key, torch.get_default_dtype())
        plan = self.known.get(full)
        if plan is None:
            plan = self.known[full] = self._ask(func, args, kwargs)
        return plan

    def _ask(self, func: Any, args: Any, kwargs: Any) -> Plan:
        if func._schema.name.startswith("aten::_foreach_"):
            return self._ask_foreach(func, args, kwargs)
        mirrors: list[torch.Tensor] = []
        if asks_kernel(func):
            result = func(*_zeros(args, mirrors), **_zeros(kwargs, mirrors))
        else:
            fake_args, fake_kwargs = self._mirror(args, mirrors), self._mirror(kwargs, mirrors)
            with self.oracle:
                result = func(*fake_args, **fake_kwargs)
        container = type(result) if isinstance(result, list | tuple) else None
        storages = {m.untyped_storage()._cdata: i for i, m in reversed(list(enumerate(mirrors)))}
        groups: dict[int, int] = {}
        leaves = list(result) if container else [result]
        shared = [t.untyped_storage()._cdata for t in leaves if isinstance(t, torch.Tensor)]
        outputs = tuple(_describe(leaf, mirrors, storages, groups, shared) for leaf in leaves)
        return Plan(container if container in (None, list) else tuple, corrected(func, args, outputs))

    def _ask_foreach(self, func: Any, args: Any, kwargs: Any) -> Plan:
        """Each place of the lists is an op of its own: equal places are asked once."""
        if func._schema.name.endswith("_") or not func._schema.returns:
            return Plan(None, (_Constant(None),))
        lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple)]
        length = len(lists[0])
        keys = [tuple(metadata_key(a[i], []) for a in lists if len(a) == length) for i in range(length)]
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        kept = sorted(first.values())

        def pick(a: Any) -> Any:
            return [a[i] for i in kept] if isinstance(a, list | tuple) and len(a) == length else a

        mirrors: list[torch.Tensor] = []
        picked = [self._mirror(pick(a), mirrors) for a in args]
        named = {n: self._mirror(pick(a), mirrors) for n, a in kwargs.items()}
        with self.oracle:
            result = func(*picked, **named)
        place = {i: n for n, i in enumerate(kept)}
        shared = [t.untyped_storage()._cdata for t in result]
        outputs = [_describe(result[place[first[key]]], mirrors, {}, {}, shared) for key in keys]
        return Plan(list, tuple(outputs))

    def _mirror(self, tree: Any, mirrors: list[torch.Tensor]) -> Any:
        """The same arguments with fake tensors in place of ghosts."""
        if isinstance(tree, torch.Tensor):
            last = sum((n - 1) * s for n, s in zip(tree.shape, tree.stride(), strict=True)) + 1 if tree.numel() else 0
            needed = (tree.storage_offset() + last) * tree.element_size()
            base = torch.empty(max(needed, tree.untyped_storage().nbytes()), dtype=torch.uint8, device="meta")
            elem = torch.empty(0, dtype=tree.dtype, device="meta")
            elem.set_(base.untyped_storage(), tree.storage_offset(), tree.shape, tree.stride())
            mirror = FakeTensor(self.oracle, elem, CPU)
            mirrors.append(mirror)
            return mirror
        if isinstance(tree, list | tuple):
            return type(tree)([self._mirror(item, mirrors) for item in tree])
        if isinstance(tree, dict):
            return {name: self._mirror(item, mirrors) for name, item in tree.items()}
        return tree


@cache
def shared_plans() -> Plans:
    """The plans of this process: they depend on metadata alone, so that a second trace asks nothing twice."""
    return Plans()


def _zeros(tree: Any, mirrors: list[torch.Tensor]) -> Any:
    """The same arguments as real zeros, for a kernel that must be asked itself."""
    if isinstance(tree, torch.Tensor):
        if tree.untyped_storage().nbytes() > MAX_KERNEL_BYTES:
            raise MemoryError("an argument is too large to ask the kernel itself")
        mirrors.append(torch.zeros(tree.shape, dtype=tree.dtype))
        return mirrors[-1]
    if isinstance(tree, list | tuple):
        return type(tree)([_zeros(item, mirrors) for item in tree])
    if isinstance(tree, dict):
        return {name: _zeros(item, mirrors) for name, item in tree.items()}
    return tree


def _describe(
    leaf: Any, mirrors: list[torch.Tensor], storages: dict[int, int], groups: dict[int, int], shared: list[int]
) -> Any:
    """One output as a plan's entry."""
    if not isinstance(leaf, torch.Tensor):
        assert not isinstance(leaf, list | tuple | dict), "nested outputs"
        return _Constant(leaf)
    for i, mirror in enumerate(mirrors):
        if leaf is mirror:
            return _Same(i)
    storage = leaf.untyped_storage()
    shape, stride, offset = tuple(leaf.shape), tuple(leaf.stride()), int(leaf.storage_offset())
    if storage._cdata in storages:
        return _View(storages[storage._cdata], leaf.dtype, shape, stride, offset)
    plain_bytes = torch.empty_strided(shape, stride, dtype=leaf.dtype, device="meta").untyped_storage().nbytes()
    plain = offset == 0 and plain_bytes == storage.nbytes() and shared.count(storage._cdata) == 1
    group = groups.setdefault(storage._cdata, len(groups))
    return _New(leaf.dtype, shape, stride, offset, storage.nbytes(), group, plain)
