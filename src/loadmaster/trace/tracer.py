"""The tracer: a dispatch mode that lets every op of a step run on ghosts and follows each storage by a weak reference.

Nothing is estimated: a storage is born when the op that allocates it returns and dies when the last tensor, autograd
node or Python name lets go of it, exactly as in a real run. Bytes are counted at op boundaries: scratch that a kernel
allocates and frees inside itself is not seen.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from loadmaster.errors import LoadmasterError
from loadmaster.trace.flop_count import forward_flops
from loadmaster.trace.ghost import CPU, Ghost, as_meta, ghost_of, metadata_key, shared_plans, tensors_in
from loadmaster.trace.timeline import CAST_TERM, Category
from loadmaster.trace.values import Values
from loadmaster.trace.whereabouts import Whereabouts

__all__ = ["Life", "Tracer", "Untraceable"]

_DEVICE = torch.ops.prim.device.default
_ITEM = torch.ops.aten._local_scalar_dense.default
_EQUAL = torch.ops.aten.equal.default
_CAST = torch.ops.aten._to_copy.default
_INDEX = torch.ops.aten.index.Tensor
_WAIT = "_c10d_functional::wait_tensor"
_LIFTS = ("aten::lift_fresh", "aten::lift", "aten::lift_fresh_copy")
# ops that change an argument's own sizes or storage: run on the ghost itself
_RESHAPERS = ("aten::resize_", "aten::resize_as_", "aten::set_", "inductor::resize_storage_bytes_", "fsdp::set_")
_PLAIN = (Ghost, torch.Tensor, torch.nn.Parameter)
_FAKE_KEY = torch._C._TorchDispatchModeKey.FAKE


class Untraceable(LoadmasterError):
    """Something in the module cannot be followed without data; names the module and the op."""


class Life:
    """A storage while it is followed."""

    __slots__ = (
        "birth", "bytes", "category", "death", "dtype", "index", "largest", "name", "owner", "saved_by", "saved_from",
        "saved_until", "saves", "shape", "stream", "term",
    )  # fmt: skip

    def __init__(self, index: int, size: int, dtype: torch.dtype, shape: tuple[int, ...], birth: int) -> None:
        self.index, self.bytes, self.largest, self.dtype, self.shape, self.birth = (
            index,
            size,
            size,
            dtype,
            shape,
            birth,
        )
        self.category = Category.TEMPORARY
        self.term = ""
        self.name = self.owner = ""
        self.death: int | None = None
        self.saves = 0
        self.saved_from: int | None = None
        self.saved_until: int | None = None
        self.saved_by: int | None = None  # sequence number of the node that saved it
        self.stream = 0


class _Watch(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that knows its life."""

    __slots__ = ("cdata", "life")
    cdata: int
    life: Life


class _Facts:
    """What is asked of an op again and again, asked once."""

    __slots__ = ("collective", "name", "out", "reshapes", "silent", "writes")

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = schema.name
        tags = func.tags
        self.writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        self.out = any(a.kwarg_only and a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        self.reshapes = torch.Tag.inplace_view in tags or self.name in _RESHAPERS
        self.silent = self.name.startswith("profiler::")
        self.collective = self.name.startswith(("c10d::", "_c10d_functional::", "fsdp::", "_dtensor::"))


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows storages; see the module's first line.

    Args:
        whereabouts: says which module runs, and of which forward op a backward op is the derivative.
        real: ops run on real tensors (for modules that need data); otherwise everything is a ghost.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: the wrapper that keeps the compiler out costs more than the op it guards; nothing is compiled here."""
        return False

    def __init__(self, whereabouts: Whereabouts, *, real: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where = whereabouts
        self.real = real
        self.plans = shared_plans()
        self.values = Values()
        self.lives: list[Life] = []
        self.watches: dict[int, _Watch] = {}  # by address of the storage; one watch per living storage
        self.delta_event: list[int] = []
        self.delta_storage: list[int] = []
        self.delta_bytes: list[int] = []
        self.refusal: Untraceable | None = None
        self.flops: dict[int, int] | None = None  # by event, where they are to be counted
        self._facts: dict[Any, _Facts] = {}
        self._adopted: dict[int, tuple[torch.Tensor, Ghost]] = {}
        self._resize = torch.UntypedStorage.resize_

    # -- following storages ------------------------------------------------------------------------------------------

    def follow(self, tensor: torch.Tensor) -> Life:
        """Start (or go on) to follow the storage under `tensor`."""
        storage = tensor.untyped_storage()
        known = self.watches.get(storage._cdata)
        if known is not None:
            return known.life
        size = storage.nbytes()
        life = Life(len(self.lives), size, tensor.dtype, tuple(tensor.shape), self.where.event)
        self.lives.append(life)
        made = _Watch(storage, self._died)
        made.life, made.cdata = life, storage._cdata
        self.watches[storage._cdata] = made
        self._change(life, size)
        return life

    def life_of(self, tensor: torch.Tensor) -> Life | None:
        """The life of the storage under `tensor`, if it is followed."""
        watch = self.watches.get(tensor.untyped_storage()._cdata)
        return None if watch is None else watch.life

    def _died(self, watch: Any) -> None:
        life: Life = watch.life
        address: int = watch.cdata
        life.death = self.where.event
        if self.watches.get(address) is watch:
            del self.watches[address]
        self._change(life, -life.bytes)
        life.bytes = 0

    def _change(self, life: Life, size: int) -> None:
        if size:
            self.delta_event.append(self.where.event)
            self.delta_storage.append(life.index)
            self.delta_bytes.append(size)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Book the new size of a storage that changed it in place."""
        watch = self.watches.get(storage._cdata)
        if watch is not None:
            life, size = watch.life, storage.nbytes()
            self._change(life, size - life.bytes)
            life.bytes, life.largest = size, max(size, life.largest)

    def note_gathered(self, storage: torch.UntypedStorage) -> None:
        """Only fully_shard frees and refills storages in place: they are parameters gathered for use."""
        watch = self.watches.get(storage._cdata)
        if watch is not None and watch.life.category in (Category.TEMPORARY, Category.ACTIVATION):
            watch.life.category, watch.life.term = Category.COMMUNICATION, "buffers/all_gather"

    # -- dispatch ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Any:
        tracer, original = self, torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            tracer.resized(storage)
            tracer.note_gathered(storage)
            return result

        self._resize = original
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *details: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*details)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op and book what it made."""
        if func is _DEVICE:
            return args[0].device if types and types[0] is not Ghost else CPU
        for kind in types:
            if kind is FakeTensor:
                return func(*args, **(kwargs or {}))  # somebody else's, as DTensor's shape propagation uses them
            if kind not in _PLAIN:
                return NotImplemented  # DTensor and other wrappers unwrap first, and come back
        kwargs = kwargs or {}
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = _Facts(func)
        if facts.silent:
            return func(*args, **kwargs)
        self.where.advance(func)
        if self.real:
            return self._booked(func(*args, **kwargs), facts)
        tensors: list[torch.Tensor] = []
        key = metadata_key((args, kwargs), tensors) if kwargs else metadata_key(args, tensors)
        if not tensors and torch._C._get_dispatch_mode(_FAKE_KEY) is not None:
            return func(*args, **kwargs)  # makes a fake tensor of somebody else's
        try:
            return self._ghostly(func, facts, key, tensors, args, kwargs)
        except Untraceable as refusal:
            self.refusal = self.refusal or refusal
            raise

    def _ghostly(self, func: Any, facts: _Facts, key: Any, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """Run an op on ghosts."""
        known = self._values_known(tensors)
        if func is _ITEM or func is _EQUAL:
            return self._item(func, known, args, kwargs)
        if facts.name in _LIFTS and not isinstance(args[0], Ghost):
            return self._born(self.adopt(args[0], own=True, constant=True))
        if any(not isinstance(t, Ghost) for t in tensors):
            args, kwargs = self._all_ghosts(args), self._all_ghosts(kwargs)
            tensors = tensors_in((args, kwargs), [])
        if facts.reshapes or facts.out or facts.name.startswith("c10d::"):
            return self._in_place_metadata(func, facts, tensors, args, kwargs)
        if facts.name == _WAIT:
            return args[0]
        born: list[Ghost] = []
        value = None
        try:
            value = self._value(func, facts, known, tensors, args, kwargs)
            result = self.plans.find(func, key, args, kwargs).make(tensors, born)
        except LoadmasterError:
            raise
        except Exception as error:
            if value is not None:
                result = self._from_value(value, born)
            elif func is _INDEX and all(self._values_known([i]) for i in args[1] if i is not None):
                result = self._masked(func, args, born)
            else:
                raise self._refuse(func, error) from None
        for ghost in born:
            life = self.follow(ghost)
            if func is _CAST:
                self._note_cast(life, args[0])
            if facts.collective:
                life.category = Category.COMMUNICATION
        if value is not None:
            _attach(result, value)
        if self.flops is not None:
            count = forward_flops(func, args, kwargs, result)
            if count:
                self.flops[self.where.event] = count
        return result

    def _note_cast(self, life: Life, source: torch.Tensor) -> None:
        """A parameter cast to another dtype (autocast's copy) is no activation of its layer, though it is saved."""
        of = self.life_of(source)
        if of is not None and of.category is Category.PARAMETER:
            life.term, life.name, life.owner = CAST_TERM, f"{of.name} cast", of.owner

    def _values_known(self, tensors: list[torch.Tensor]) -> bool:
        values = self.values
        for tensor in tensors:
            if isinstance(tensor, Ghost):
                if tensor.value is None or values.of(tensor) is None:
                    return False
            elif not values.worth(tensor):
                return False
        return True

    def _value(self, func: Any, facts: _Facts, known: bool, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """The op's real result where its arguments have values; in-place ops change or taint the values."""
        if not known:
            if facts.writes:
                for tensor in tensors:  # conservative: whatever had a value and may be written to
                    value = getattr(tensor, "value", None)
                    if value is not None and _is_written(func, tensor, args, kwargs):
                        self.values.taint(value)
            return None
        if not self.values.computable(func):
            return None
        if not tensors and not _small_factory(args, kwargs):
            return None
        value = self.values.evaluate(func, args, kwargs)
        return value if all(self.values.worth(t) for t in tensors_in(value, [])) else None

    def _item(self, func: Any, known: bool, args: Any, kwargs: Any) -> Any:
        if not known:
            if _initialising():
                return False
            raise self._refuse(func, None)
        return self.values.evaluate(func, args, kwargs)

    def _in_place_metadata(self, func: Any, facts: _Facts, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """Ops that change an argument's own sizes or storage, out= variants and collectives: run as meta kernels."""
        for tensor in tensors:
            value = getattr(tensor, "value", None)
            if value is not None and facts.writes:
                self.values.taint(value)
        try:
            with as_meta():
                result = func(*args, **kwargs)
        except Exception as error:
            raise self._refuse(func, error) from None
        for tensor in tensors:
            self.resized(tensor.untyped_storage())
            self.follow(tensor)
        return self._booked(_dressed(result), facts)

    def _booked(self, result: Any, facts: _Facts) -> Any:
        for tensor in tensors_in(result, []):
            if tensor.untyped_storage()._cdata not in self.watches:
                life = self.follow(tensor)
                if facts.collective:
                    life.category = Category.COMMUNICATION
            elif facts.writes:
                self.resized(tensor.untyped_storage())
        return result

    def _born(self, ghost: Ghost) -> Ghost:
        self.follow(ghost)
        return ghost

    # -- real tensors that enter -------------------------------------------------------------------------------------

    def adopt(self, tensor: torch.Tensor, *, own: bool = False, constant: bool = False) -> Ghost:
        """A ghost for a real tensor: one per real tensor, or one of its `own`.

        Its elements are its value where they are few and integers; floats only in a `constant` of the code.
        """
        before = self._adopted.get(id(tensor))
        if before is not None and not own:
            return before[1]
        with _disable_current_modes():
            elem = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            ghost = ghost_of(elem)
            if tensor.device.type != "meta" and self.values.worth(tensor, floats=constant):
                ghost.value = tensor.detach().clone()
        if not own:
            self._adopted[id(tensor)] = (tensor, ghost)
            self.follow(ghost)
        return ghost

    def _all_ghosts(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            return tree if isinstance(tree, Ghost) else self.adopt(tree)
        if isinstance(tree, list | tuple):
            return type(tree)([self._all_ghosts(item) for item in tree])
        if isinstance(tree, dict):
            return {name: self._all_ghosts(item) for name, item in tree.items()}
        return tree

    def _masked(self, func: Any, args: Any, born: list[Ghost]) -> Any:
        """``x[mask]`` with a known mask: the places it selects are known, and are an index of known size."""
        places: list[Any] = []
        for index in args[1]:
            if index is not None and index.dtype is torch.bool:
                real = self.values.of(index)
                assert real is not None
                places += [self.adopt(place, own=True) for place in real.nonzero(as_tuple=True)]
            else:
                places.append(index)
        given: list[torch.Tensor] = []
        key = metadata_key((args[0], places), given)
        return self.plans.find(func, key, (args[0], places), {}).make(given, born)

    def _from_value(self, value: Any, born: list[Ghost]) -> Any:
        """Outputs whose very shape depends on values (``nonzero``): shaped like the real ones."""
        if isinstance(value, torch.Tensor):
            ghost = ghost_of(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"))
            born.append(ghost)
            return ghost
        if isinstance(value, list | tuple):
            return type(value)([self._from_value(item, born) for item in value])
        return value

    def _refuse(self, func: Any, error: Exception | None) -> Untraceable:
        """The message for what cannot be followed."""
        if isinstance(error, Untraceable):
            return error
        kind = type(error).__name__ if error is not None else ""
        if error is None or kind in ("DataDependentOutputException", "DynamicOutputShapeException"):
            why = "its result depends on the elements of a tensor, which a trace without data does not have"
            out = "trace with real tensors on a small shape (real=True, or --real), or let that branch see shapes only"
        elif kind == "UnsupportedOperatorException":
            why = "the op has no shape rule (a fake or meta kernel)"
            out = "register one with torch.library.register_fake, or trace with real tensors (real=True, or --real)"
        else:
            why = f"it fails on these shapes ({str(error).splitlines()[0] if str(error) else kind})"
            out = "check the inputs' shapes and dtypes"
        return Untraceable(f"module {self.where.module or '(root)'}, op {func}: {why}; {out}")


def _initialising() -> bool:
    """Whether `torch.nn.init` asks (``trunc_normal_`` redraws until all fits): what it draws changes no size."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.nn.init":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _dressed(result: Any) -> Any:
    """Plain meta tensors that a kernel returned, as ghosts."""
    if isinstance(result, torch.Tensor):
        return result if isinstance(result, Ghost) else ghost_of(result)
    if isinstance(result, list | tuple):
        return type(result)([_dressed(item) for item in result])
    return result


def _attach(result: Any, value: Any) -> None:
    """Give ghosts the values computed for them."""
    if isinstance(result, Ghost):
        if result.value is not value:
            result.value = value
    elif isinstance(result, list | tuple):
        for ghost, real in zip(result, value, strict=True):
            _attach(ghost, real)


def _is_written(func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> bool:
    """Whether `tensor` stands where the op's schema writes."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        if any(t is tensor for t in tensors_in(given, [])):
            return True
    return False


def _small_factory(args: Any, kwargs: Any) -> bool:
    """Whether a factory (``arange``, ``full``) makes few enough elements to be worth computing."""
    size = 1
    for item in args:
        if isinstance(item, list | tuple):
            for n in item:
                size *= n if isinstance(n, int) else 1
        elif isinstance(item, int | float):
            size = max(size, int(abs(item)) if abs(item) < 1 << 40 else 1)
    dtype = kwargs.get("dtype")
    floats = dtype is not None and dtype.is_floating_point
    return size <= (64 if floats else 1 << 20)
