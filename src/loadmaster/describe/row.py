"""A measured run as one row of a table: read it into Model, Cluster, Workload, Layout and Stack, or say why not.

The table is tab-separated with a header; its columns are those of docs/validation.md. A cell that is empty was not
stated by the source. Nothing is guessed that would move a prediction: such a row is refused with the field's name.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.layout import Layout
from loadmaster.describe.model import Model
from loadmaster.describe.row_cells import Row, count, number
from loadmaster.describe.row_layout import row_layout, row_workload
from loadmaster.describe.row_model import row_model
from loadmaster.describe.row_stack import MemoryKind, memory_kind, row_stack, row_stage, unsaid
from loadmaster.describe.stack import Stack
from loadmaster.describe.workload import Workload
from loadmaster.errors import InvalidInput

__all__ = ["Described", "MemoryKind", "describe_row", "read_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A row as values.

    Attributes:
        stage: pipeline stage whose memory was measured, or ``worst``.
        memory_kind, memory_bytes: what was measured (None: nothing); step_seconds: of an optimizer step, or None.
        failed: the source says out of memory, or the run did not finish.
        complete: nothing that moves memory was left unsaid (see `row_stack.unsaid`); missing: what was.
    """

    row_id: str
    model: Model
    cluster: Cluster
    workload: Workload
    layout: Layout
    stack: Stack
    stage: int | str
    memory_kind: MemoryKind
    memory_bytes: float | None
    step_seconds: float | None
    tokens_per_second_per_device: float | None
    status: str
    missing: tuple[str, ...]

    @property
    def failed(self) -> bool:
        """Out of memory, or not finished."""
        return self.status not in ("ok", "")

    @property
    def complete(self) -> bool:
        """Whether the source states everything that moves memory."""
        return not self.missing


def read_rows(path: str | PathLike[str]) -> Iterator[dict[str, str]]:
    """Rows of a table as dicts.

    Raises:
        InvalidInput: it cannot be read, or has no ``row_id`` column.
    """
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, delimiter="\t")
            if "row_id" not in (reader.fieldnames or ()):
                raise InvalidInput("file", str(path), "has no row_id column", "give a table in the schema of the docs")
            yield from ({k: v or "" for k, v in row.items() if k} for row in reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidInput("file", str(path), f"cannot be read ({error})", "give a tab-separated table") from None


def describe_row(row: Row) -> Described:
    """The row as values.

    Raises:
        InvalidInput: a field that the laws need is missing or has a meaning they do not know.
    """
    row = defaultdict(str, row)  # a column that a table lacks is a cell left empty
    model = row_model(row)
    layout = row_layout(row)
    dp = layout.dp
    workload = row_workload(row, layout, dp)
    layout.num_micro_batches(workload)
    if layout.virtual_stages > model.num_layers:
        raise InvalidInput(
            "row.vpp", layout.virtual_stages, f"is more chunks than the {model.num_layers} layers", "check vpp"
        )
    return Described(
        row_id=row["row_id"], model=model, cluster=_cluster(row, layout.world_size), workload=workload, layout=layout,
        stack=row_stack(row), stage=row_stage(row, layout), memory_kind=memory_kind(row.get("mem_kind", "")),
        memory_bytes=number(row, "mem_gib", 1 << 30), step_seconds=number(row, "step_time_s"),
        tokens_per_second_per_device=number(row, "tokens_per_s_per_gpu"), status=row.get("status", ""),
        missing=unsaid(row),
    )  # fmt: skip


# ---- devices

# as sources print them -> catalogue; where a form factor is left out, the SXM board is taken
_DEVICES = {
    "h100-sxm-80gb": "h100-sxm", "h100-80gb": "h100-sxm", "h100": "h100-sxm", "h100-sxm-96gb-hbm2e-500w":
    "h100-sxm-96gb-hbm2e", "h800-80gb": "h800-sxm", "h200": "h200", "b200": "b200", "b200 (power limited)": "b200",
    "gb200": "gb200", "b300": "b300", "gb300": "gb300", "a100-sxm-80gb": "a100-sxm-80gb", "a100-80gb": "a100-sxm-80gb",
    "a100": "a100-sxm-80gb", "a800-80gb": "a800-sxm-80gb", "a100-sxm-40gb": "a100-sxm-40gb",
    "a100-sxm4-40gb": "a100-sxm-40gb", "a100-40gb": "a100-sxm-40gb", "v100-32gb": "v100-sxm-32gb", "v100-16gb":
    "v100-sxm-16gb", "a10g": "a10g", "rtx3090": "rtx3090", "rtx4090": "rtx4090", "a5000": "rtx3090",
    "a6000 ada": "l40s", "rtx a6000": "a6000", "nvidia l40s": "l40s", "mi355x": "mi355x",
    "mi300 (variant not named)": "mi300x", "v100-sxm3-32gb (dgx-2)": "v100-sxm-32gb", "v100": "v100-sxm-32gb",
    "a100-sxm-40gb (dgx a100)": "a100-sxm-40gb", "blackwell (184.3 gib, model not named)": "b200",
}  # fmt: skip


def _cluster(row: Row, world_size: int) -> Cluster:
    name = row.get("gpu", "").strip().lower()
    if name not in _DEVICES:
        raise InvalidInput("row.gpu", row.get("gpu", ""), "is not in the catalogue", "name one of its devices")
    per_node = count(row, "gpus_per_node", 8)
    cluster = Cluster.parse(f"{per_node}x{_DEVICES[name]}")
    far = _network(row.get("interconnect", ""), per_node)
    if far is not None:
        cluster = replace(cluster, inter_node=replace(cluster.inter_node, bandwidth=far))
    if world_size % per_node == 0:
        return replace(cluster, devices_per_node=per_node, num_nodes=world_size // per_node)
    return cluster.resized(world_size) if world_size <= per_node else _odd(cluster, per_node, world_size)


def _network(text: str, per_node: int) -> float | None:
    """A device's bytes/s between nodes, from ``8x200 Gb/s``, ``400 Gb/s per GPU`` or a node's sum."""
    match = re.search(r"(?:(\d+)x)?(\d+) ?Gb(?:ps|/s)?\b", text)
    if match is None:
        return None
    each = float(match[2]) * 1e9 / 8
    return each if "per GPU" in text else each * int(match[1] or 1) / per_node


def _odd(cluster: Cluster, per_node: int, world_size: int) -> Cluster:
    """Nodes that a run did not fill."""
    share = next(n for n in range(per_node, 0, -1) if world_size % n == 0)
    return replace(cluster, devices_per_node=share, num_nodes=world_size // share)
