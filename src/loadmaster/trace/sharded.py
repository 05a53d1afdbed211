"""One rank of many: a fake process group of any size, fully_shard and tensor parallelism applied as a real run would.

Nothing is sent: collectives return at once with tensors of the right size. What the rank holds (its shards, what it
gathers, its gradients' pieces) is what a real rank of that world holds. ZeRO stages 1 and 2 are our runtime's own
buckets, which are priced by the laws and not traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from loadmaster.describe.layout import Layout
from loadmaster.errors import InvalidInput
from loadmaster.trace.recompute import repeated_blocks

__all__ = ["check_layout", "fake_ranks", "place"]

# last part of a linear layer's path -> how it is split (transformers' names)
_COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "query", "key", "value", "wi", "wi_0", "wi_1")
_ROW = ("o_proj", "down_proj", "out_proj", "fc2", "wo")


def check_layout(layout: Layout) -> None:
    """Refuse what is not traced.

    Raises:
        InvalidInput: names the field and what to do.
    """
    if layout.zero in (1, 2):
        raise InvalidInput(
            "layout.zero", layout.zero, "is not traced (our runtime's buckets)", "trace zero=3 or zero=0"
        )
    if layout.dp_shard > 1 and layout.zero == 0:
        raise InvalidInput("layout.dp_shard", layout.dp_shard, "shards nothing at zero=0", "set zero=3")
    for field in ("cp", "ep", "virtual_stages"):
        if getattr(layout, field) != 1:
            raise InvalidInput(f"layout.{field}", getattr(layout, field), "is not traced", f"set {field}=1")
    if layout.sequence_parallel:
        raise InvalidInput("layout.sequence_parallel", True, "is not traced", "leave it out")
    if layout.pp > 1 and layout.schedule not in ("gpipe", "1f1b"):
        raise InvalidInput("layout.schedule", layout.schedule, "is not traced", "trace gpipe or 1f1b")


@contextmanager
def fake_ranks(layout: Layout, rank: int = 0) -> Iterator[DeviceMesh | None]:
    """A fake process group of the ranks that share a pipeline stage, and its mesh; ended afterwards.

    Raises:
        InvalidInput: a process group runs already.
    """
    world = layout.dp_replicate * layout.dp_shard * layout.tp
    if world == 1:
        yield None
        return
    if dist.is_initialized():
        raise InvalidInput(
            "layout", layout.describe(), "is traced on a process group of its own", "end the running one"
        )
    from torch.distributed._tools import fake_collectives  # noqa: F401 - registers the collectives' shape rules
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        shape = (layout.dp_replicate, layout.dp_shard, layout.tp)
        yield init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    finally:
        dist.destroy_process_group()


def place(module: nn.Module, layout: Layout, mesh: DeviceMesh | None, compute: torch.dtype | None) -> None:
    """Split the module's linear layers over tp, then shard blocks and root over dp_shard.

    Raises:
        InvalidInput: tp > 1, and none of its linear layers has a name that says how to split it.
    """
    if mesh is None:
        return
    if layout.tp > 1:
        plan = _tensor_plan(module)
        if not plan:
            raise InvalidInput("layout.tp", layout.tp, "finds no linear layer whose name says its split", "set tp=1")
        parallelize_module(module, mesh["tp"], plan)
    if layout.zero == 3:
        both = layout.dp_replicate > 1
        options: dict[str, Any] = {"mesh": mesh["dp_replicate", "dp_shard"] if both else mesh["dp_shard"]}
        if compute is not None:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        for _, blocks in repeated_blocks(module):
            for block in blocks:
                fully_shard(block, **options)
        fully_shard(module, **options)


def _tensor_plan(module: nn.Module) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    inside = [f"{path}." for path, _ in repeated_blocks(module)]
    for path, child in module.named_modules():
        last = path.rpartition(".")[2]
        if isinstance(child, nn.Linear) and any(path.startswith(p) for p in inside):
            if last in _COLUMN:
                plan[path] = ColwiseParallel()
            elif last in _ROW:
                plan[path] = RowwiseParallel()
    return plan
