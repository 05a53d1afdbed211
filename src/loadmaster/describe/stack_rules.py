"""The parts a stack is made of: lines of state, what ops keep, what the loss makes, the allocator's habits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loadmaster.describe.precision import BYTES, Precision

__all__ = ["Alive", "Allocator", "Context", "Deferral", "Extra", "Kept", "LossTensor", "Size", "StateLine"]


class Alive(StrEnum):
    """When a line of bytes exists."""

    ALWAYS = "always"
    BACKWARD = "backward"  # while a backward runs
    STEP = "step"  # in the optimizer step only
    LAZY = "lazy"  # made by a first backward, gone after the optimizer step


class Size(StrEnum):
    """How many elements a tensor has that an op keeps beside its inputs and outputs."""

    TOKEN = "token"  # one a token
    HEADS = "heads"  # one a query head and token
    SCORES = "scores"  # one a head, query and key
    INPUT = "input"  # as its first input
    OUTPUT = "output"  # as its first output
    WEIGHT = "weight"  # as its first weight, whatever the batch


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLine:
    """So many bytes a parameter.

    Attributes:
        term: its name in the memory ledger.
        dtype: a field of `Precision` (``param``, ``compute``, ``grad``, ``reduce``, ``master``, ``moment``) or a dtype.
        zero: ZeRO stage from which it is divided by the shards, None: never.
        when: ``""`` always, ``zero0`` / ``zero1`` only below / from stage 1 on, ``replicas`` with dp > 1 only,
            ``unpiped`` with pp = 1 only; joined by ``+``.
        source: where it is written so.
    """

    term: str
    dtype: str
    alive: Alive = Alive.ALWAYS
    zero: int | None = None
    when: str = ""
    source: str = ""

    def bytes_each(self, precision: Precision) -> int:
        """Bytes a parameter; 0 where the precision keeps no such copy (no master).

        >>> StateLine(term="optimizer/master", dtype="master").bytes_each(Precision.named("bf16-master"))
        4
        """
        dtype = getattr(precision, self.dtype) if self.dtype in Precision.__slots__ else self.dtype
        return 0 if dtype is None else BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """A tensor an op keeps that is neither its input nor its output.

    Attributes:
        size: elements; dtype: ``compute``, ``param``, ``input`` (as its first input has it) or a dtype;
        low_only: only where compute is narrower than fp32.
        context_only: only where context parallelism divides the sequence.
    """

    name: str
    size: Size
    dtype: str = "fp32"
    low_only: bool = False
    context_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What one kind of op leaves for its backward: positions of inputs and outputs, and extras.

    Attributes:
        upcast: positions of inputs kept in fp32: themselves where they are fp32 already, else a copy.
    """

    inputs: tuple[int, ...] = ()
    upcast: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    extra: tuple[Extra, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTensor:
    """A tensor as large as the logits.

    Attributes:
        zero: it exists from that ZeRO stage on only.
        dtype: ``compute`` or a dtype; low_only: only where compute is narrower than fp32.
        forward, backward, head: alive at the peak of the loss's forward, of its backward, of the head's backward.
    """

    name: str
    dtype: str = "fp32"
    low_only: bool = False
    forward: bool = True
    backward: bool = True
    head: bool = False
    zero: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Bytes on the device that the framework's allocator does not count.

    Attributes:
        device: driver context and loaded kernels; communicator: buffers of one NCCL communicator.
    """

    device: int = 0
    communicator: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferral:
    """Whole copies of the stream (4 T h bytes each) that wait for the communication stream before they are reused.

    The host runs ahead of the device; what NCCL still reads or writes cannot be handed out again, so unsharded tensors
    pile up. Receiving from another stage stops the host and with it the pile. The numbers are fitted on measured rows,
    by pp and tp, not derived: docs/validation.md says what they are worth on a model they were not fitted on.

    Attributes:
        copies: by pipeline stages (from that number on), then by tp 2, 4, 8, 16 and more.
        single: fewer where a lone stage has one micro-batch; max_devices: none seen beyond, up to tp 16.
    """

    copies: tuple[tuple[int, tuple[float, float, float, float, float]], ...] = ()
    single: float = 0.0
    max_devices: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocator:
    """Bytes the caching allocator reserves beyond the live ones.

    Attributes:
        state: share of the long-lived bytes; activations: of the saved tensors; checkpoints: of checkpointed inputs.
        odd_sizes: further share of them where widths are no multiples of one another, so that blocks do not fit.
        step: share of the optimizer step's temporaries: large flat tensors that find no room in cached blocks.
        streams: whole copies of the stream (2 T h bytes) under tensor parallelism; deferral: see there.
        fixed: bytes of small pools and workspaces.
        sigma, sigma_allocated: spread of ln(measured / predicted), of reserved and of live bytes.
    """

    state: float = 0.0
    activations: float = 0.05
    checkpoints: float = 0.0
    odd_sizes: float = 0.0
    step: float = 0.0
    streams: int = 0
    deferral: Deferral = Deferral()
    fixed: int = 0
    sigma: float = 0.04
    sigma_allocated: float = 0.03
