"""The data mesh: this process's place among replicas and shards, and the process groups of each axis."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from loadmaster.describe.layout import Layout
from loadmaster.errors import InvalidInput

__all__ = ["Axis", "DataMesh", "data_mesh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One mesh axis as a rank sees it: its name, length, this rank's place, and its group (None when alone)."""

    name: str
    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataMesh:
    """`shard` is dp_shard, `replicate` dp_replicate, `data` both together (replicates outermost)."""

    shard: Axis
    replicate: Axis
    data: Axis
    device: torch.device

    @property
    def backend(self) -> str:
        """Name of the transport: ``gloo``, ``nccl``, or ``none`` for a single process."""
        return dist.get_backend(self.data.group) if self.data.group is not None else "none"


def data_mesh(layout: Layout, *, mesh: DeviceMesh | None = None, device: torch.device | str | None = None) -> DataMesh:
    """The mesh of `layout`; starts torch.distributed from torchrun's environment when nobody has.

    Raises:
        InvalidInput: the layout asks for ranks or axes that are not there.
    """
    for axis in ("tp", "pp", "cp", "ep"):
        if getattr(layout, axis) != 1:
            raise InvalidInput(
                f"layout.{axis}", getattr(layout, axis), "is planned and priced but not run by this engine",
                f"use {axis}=1, or `loadmaster export` to run it elsewhere",
            )  # fmt: skip
    device = torch.device(device) if device is not None else _default_device()
    if layout.world_size == 1:
        alone = [Axis(name=n) for n in ("dp_shard", "dp_replicate", "dp")]
        return DataMesh(shard=alone[0], replicate=alone[1], data=alone[2], device=device)
    _ensure_started(layout, device)
    grid = torch.arange(layout.world_size).view(layout.dp_replicate, layout.dp_shard) if mesh is None else _grid(mesh)
    replicate_rank, shard_rank = (int(i) for i in (grid == dist.get_rank()).nonzero()[0])
    return DataMesh(
        shard=_axis("dp_shard", grid[replicate_rank], shard_rank),
        replicate=_axis("dp_replicate", grid[:, shard_rank], replicate_rank),
        data=_axis("dp", grid.flatten(), replicate_rank * layout.dp_shard + shard_rank),
        device=device,
    )


def _default_device() -> torch.device:
    if torch.cuda.is_available():
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device("cpu")


def _ensure_started(layout: Layout, device: torch.device) -> None:
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise InvalidInput(
                "layout", layout.describe(), f"needs {layout.world_size} processes and this is one",
                "start it with torchrun or `loadmaster train`",
            )  # fmt: skip
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if dist.get_world_size() != layout.world_size:
        raise InvalidInput(
            "layout", layout.describe(), f"needs {layout.world_size} processes, not {dist.get_world_size()}",
            "start as many, or change dp_shard or dp_replicate",
        )  # fmt: skip


def _grid(mesh: DeviceMesh) -> torch.Tensor:
    """Ranks by (replicate, shard) of this rank's data axes."""
    return mesh["dp_replicate", "dp_shard"].mesh


def _axis(name: str, ranks: torch.Tensor, rank: int) -> Axis:
    """An axis with a group of its own: the engine's messages never meet those of the program around it."""
    members: list[int] = ranks.tolist()
    group = dist.new_group(members, use_local_synchronization=True) if len(members) > 1 else None
    return Axis(name=name, size=len(members), rank=rank, group=group)
