"""The plan file: everything that running, verifying or exporting a plan needs, in one TOML text.

`loadmaster plan -o plan.toml` writes it; `train`, `verify`, `audit` and `export` read it. The model's config
travels inline, so that a plan means the same on another machine.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.layout import Layout
from loadmaster.describe.model import Model
from loadmaster.describe.require import text
from loadmaster.describe.toml import dumps, write_atomic
from loadmaster.describe.workload import Workload
from loadmaster.errors import InvalidInput
from loadmaster.ledger import Ledger

__all__ = ["PlanFile"]

_VERSION = 1
_UNITS = {"memory": "bytes", "time": "seconds", "traffic": "bytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A plan, as stored.

    Attributes:
        name: of the model, as the user wrote it.
        config: its Hugging Face config, or None when `factory` names ``module:function`` instead.
        predicted: the memory, time and traffic ledgers of the layout, by those names.
    """

    name: str
    cluster: Cluster
    workload: Workload
    layout: Layout
    stack: str = "loadmaster"
    config: Mapping[str, Any] | None = None
    factory: str | None = None
    predicted: Mapping[str, Ledger] = field(default_factory=dict)

    def model(self) -> Model:
        """The model's op table.

        Raises:
            InvalidInput: the plan names a factory, which only the runtime can build.
        """
        if self.config is None:
            raise InvalidInput("model", self.factory, "is code, not a config", "use train or trace, which run it")
        return dataclasses.replace(Model.from_hf(dict(self.config)), name=self.name)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the file whole or not at all."""
        write_atomic(path, self.to_toml())

    def to_toml(self) -> str:
        """The text of the file."""
        config = None if self.config is None else json.dumps(self.config, indent=1) + "\n"
        head = "# A plan of Loadmaster: run it with `loadmaster train`, hand it on with `loadmaster export`.\n"
        return head + dumps(
            {
                "version": _VERSION,
                "stack": self.stack,
                "model": {"name": self.name, "factory": self.factory, "config": config},
                "workload": _fields(self.workload),
                "layout": self.layout.to_dict(),
                "cluster": self.cluster.to_dict(),
                "predicted": {name: {"terms": dict(ledger.terms)} for name, ledger in self.predicted.items()},
            }
        )

    @classmethod
    def load(cls, path: str | PathLike[str]) -> PlanFile:
        """Read a plan.

        Raises:
            InvalidInput: the file is missing, no TOML, of another version, or lacks a field.
        """
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InvalidInput(
                "plan", str(path), f"cannot be read ({error})", "give a file that loadmaster plan -o wrote"
            ) from None
        if data.get("version") != _VERSION:
            raise InvalidInput("plan.version", data.get("version"), f"is not {_VERSION}", "write the plan again")
        try:
            return cls._from_dict(data)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            if isinstance(error, InvalidInput):
                raise
            raise InvalidInput(
                "plan", str(path), f"has a field missing or wrong ({error})", "write the plan again"
            ) from None

    @classmethod
    def _from_dict(cls, data: Mapping[str, Any]) -> PlanFile:
        model = data["model"]
        config, factory = model.get("config"), model.get("factory")
        if (config is None) == (factory is None):
            raise InvalidInput("plan.model", model.get("name"), "needs a config or a factory", "write the plan again")
        return cls(
            name=str(model["name"]),
            config=None if config is None else json.loads(config),
            factory=factory,
            stack=text("plan.stack", data["stack"]),
            workload=Workload(**data["workload"]),
            layout=Layout(**data["layout"]),
            cluster=Cluster.from_dict(data["cluster"]),
            predicted={
                name: Ledger.read(f"plan.predicted.{name}", _UNITS[name], table.get("terms", {}))
                for name, table in data.get("predicted", {}).items()
            },
        )


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
