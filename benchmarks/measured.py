"""Measured steps as groups of columns: rows that share model, machine, stack and workload are priced at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from loadmaster.describe.calibration import Calibration
from loadmaster.describe.cluster import Cluster
from loadmaster.describe.model import Model
from loadmaster.describe.row import describe_row, read_rows
from loadmaster.describe.stack import Stack
from loadmaster.describe.workload import Workload
from loadmaster.errors import InvalidInput
from loadmaster.laws.step import time_terms

VALIDATION = Path(__file__).parents[1] / "validation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows priced together; `columns` are their layouts, `rows` the table's own cells."""

    model: Model
    cluster: Cluster
    stack: Stack
    workload: Workload
    columns: Any
    seconds: np.ndarray
    rows: tuple[dict[str, str], ...]

    def predict(self, constants: Calibration | None = None) -> np.ndarray:
        terms = time_terms(self.model, self.cluster, self.workload, self.columns, self.stack, constants=constants)
        return np.sum([np.broadcast_to(v, self.seconds.shape) for v in terms.values()], axis=0)


def load(name: str, folder: Path = VALIDATION) -> tuple[list[Group], dict[str, str]]:
    """Groups of a table's timed rows, and why the others cannot be priced (by row_id)."""
    found: dict[tuple[object, ...], list[tuple[Any, dict[str, str]]]] = {}
    refused: dict[str, str] = {}
    for row in read_rows(folder / f"{name}.tsv"):
        if not row.get("step_time_s"):
            continue
        try:
            d = describe_row(row)
        except InvalidInput as error:
            refused[row["row_id"]] = str(error)
            continue
        device = (
            d.cluster.device.name,
            d.cluster.devices_per_node,
            d.cluster.inter_node.bandwidth,
            d.cluster.fast_domain,
        )
        categories = (d.layout.schedule, d.layout.recompute, d.layout.precision)
        key = (id(d.model), device, id(d.stack), d.workload, categories)
        found.setdefault(key, []).append((d, row))
    return [_group(members) for members in found.values()], refused


def _group(members: list[tuple[Any, dict[str, str]]]) -> Group:
    first = members[0][0]
    columns = SimpleNamespace()
    for field, value in first.layout.to_dict().items():
        values = [getattr(d.layout, field) for d, _ in members]
        setattr(columns, field, value if isinstance(value, str) else np.array(values))
    return Group(
        model=first.model, cluster=first.cluster, stack=first.stack, workload=first.workload, columns=columns,
        seconds=np.array([float(row["step_time_s"]) for _, row in members]), rows=tuple(row for _, row in members),
    )  # fmt: skip


def predict(groups: list[Group], constants: Calibration | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and measured seconds of every row, in order."""
    return np.concatenate([g.predict(constants) for g in groups]), np.concatenate([g.seconds for g in groups])


def cells(groups: list[Group], field: str) -> np.ndarray:
    """A column of the table, as printed."""
    return np.array([row[field] for g in groups for row in g.rows])


def errors(predicted: np.ndarray, measured: np.ndarray) -> dict[str, float]:
    """Absolute per cent error: mean, median, 90th percentile; signed median."""
    signed = 100.0 * (predicted / measured - 1.0)
    size = np.abs(signed)
    return {"rows": len(size), "mean": float(size.mean()), "median": float(np.median(size)),
            "p90": float(np.percentile(size, 90)), "bias": float(np.median(signed))}  # fmt: skip


def stalled(groups: list[Group], predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Runs of the nanotron sweep with pp > 1 that waited more than 0.4 s for every micro-batch beyond the law."""
    if not any(g.stack.name == "nanotron" for g in groups):
        return np.zeros(len(measured), dtype=bool)
    columns = {f: cells(groups, f).astype(float) for f in ("pp", "micro_batch", "dp", "global_batch")}
    micro_batches = columns["global_batch"] / columns["dp"] / columns["micro_batch"]
    nanotron = np.array([g.stack.name == "nanotron" for g in groups for _ in g.rows])
    return nanotron & (columns["pp"] > 1) & ((measured - predicted) / micro_batches > 0.4)
