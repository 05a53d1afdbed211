"""The data mesh: this process's place among replicas and shards, and the process groups of each axis."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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
    if mesh is None:
        mesh = init_device_mesh(
            device.type, (layout.dp_replicate, layout.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
        )
    replicate, shard = _axis(mesh, "dp_replicate"), _axis(mesh, "dp_shard")
    group = dist.group.WORLD if mesh.size() == dist.get_world_size() else _flat_group(mesh)
    rank = replicate.rank * shard.size + shard.rank
    data = Axis(name="dp", size=layout.dp, rank=rank, group=group if layout.dp > 1 else None)
    return DataMesh(shard=shard, replicate=replicate, data=data, device=device)


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


def _axis(mesh: DeviceMesh, name: str) -> Axis:
    part = mesh[name]
    group = part.get_group() if part.size() > 1 else None
    return Axis(name=name, size=part.size(), rank=part.get_local_rank(), group=group)


def _flat_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    return mesh["dp_replicate", "dp_shard"]._flatten("loadmaster_dp").get_group()
