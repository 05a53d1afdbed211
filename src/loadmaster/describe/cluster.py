"""Devices, links and clusters: what a step runs on.

The catalogue (`catalog/devices.toml`) gives dense peaks, memory and links with the source of each figure;
`loadmaster measure` writes the same form for the machine it runs on.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

from loadmaster.describe.require import flag, given, real, whole
from loadmaster.errors import InvalidInput
from loadmaster.units import parse_count

__all__ = ["Cluster", "Device", "Link", "device_names"]

_MOST_DEVICES = 1 << 24  # of a node, and nodes: what is larger is a slip of the pen
_SEE = "see docs/cluster-file.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator (or one CPU rank).

    Attributes:
        memory_bytes: what the device reports; memory_bandwidth: bytes/s.
        peak_flops: dense FLOP/s by dtype, never 2:4 sparse; empty when unknown: no MFU is then printed.
        source: where the figures come from.
        price_per_hour: dollars, None when not given.
        measured: the peaks were measured here, not read from a data sheet.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    source: str = ""
    price_per_hour: float | None = None
    measured: bool = False

    def __post_init__(self) -> None:
        whole("device.memory_bytes", self.memory_bytes)
        real("device.memory_bandwidth", self.memory_bandwidth, above=0)
        for dtype, peak in self.peak_flops.items():
            real(f"device.peak_flops.{dtype}", peak, above=0)
        if self.price_per_hour is not None:
            real("device.price_per_hour", self.price_per_hour, above=0)
        flag("device.measured", self.measured)

    def peak(self, dtype: str) -> float | None:
        """Dense peak FLOP/s for matrix products in `dtype`, or None when it is not known."""
        if dtype == "fp32" and "fp32" not in self.peak_flops:
            return self.peak_flops.get("tf32")
        return self.peak_flops.get(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A tier of the network, seen by one device: latency in seconds, bandwidth in bytes/s each way.

    `gamma`, seconds per sqrt(byte), is how slowly bandwidth rises with a message's size; 0 where nobody measured it.
    """

    latency: float
    bandwidth: float
    name: str = ""
    gamma: float = 0.0

    def __post_init__(self) -> None:
        real("link.latency", self.latency)
        real("link.bandwidth", self.bandwidth, above=0)
        real("link.gamma", self.gamma)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices.

    Attributes:
        intra_node, inter_node: a device's share of the tier.
        link_domain: devices that `intra_node` links join, where that is more than a node (an NVL72 rack).
        memory_cap: bytes a rank may use, when less than the device has.

    >>> c = Cluster.parse("64xh100-sxm")
    >>> c.num_devices, c.num_nodes, c.device.peak("bf16")
    (64, 8, 989400000000000.0)
    """

    device: Device
    devices_per_node: int
    num_nodes: int
    intra_node: Link
    inter_node: Link
    memory_cap: int | None = None
    source: str = ""
    link_domain: int | None = None

    def __post_init__(self) -> None:
        whole("cluster.devices_per_node", self.devices_per_node, most=_MOST_DEVICES)
        whole("cluster.num_nodes", self.num_nodes, most=_MOST_DEVICES)
        for name in ("memory_cap", "link_domain"):
            if getattr(self, name) is not None:
                whole(f"cluster.{name}", getattr(self, name))

    @property
    def fast_domain(self) -> int:
        """Devices within reach of `intra_node` links."""
        return max(self.devices_per_node, self.link_domain or 0)

    @property
    def num_devices(self) -> int:
        """All devices."""
        return self.devices_per_node * self.num_nodes

    @property
    def memory_bytes(self) -> int:
        """Bytes a rank may use."""
        return min(self.device.memory_bytes, self.memory_cap or self.device.memory_bytes)

    def tier(self, ranks_span: int) -> Link:
        """The slowest link that a group of neighbouring ranks spanning `ranks_span` devices crosses."""
        return self.intra_node if ranks_span <= self.fast_domain else self.inter_node

    def resized(self, num_devices: int) -> Cluster:
        """The same hardware with another number of devices.

        Raises:
            InvalidInput: more than a node and no multiple of it.
        """
        if num_devices < 1:
            raise InvalidInput("cluster.num_devices", num_devices, "must be at least 1", "give a positive count")
        per_node = min(self.devices_per_node, num_devices)
        if num_devices % per_node:
            raise InvalidInput(
                "cluster.num_devices",
                num_devices,
                f"is no multiple of the {per_node} of a node",
                "use whole nodes",
            )
        return replace(self, devices_per_node=per_node, num_nodes=num_devices // per_node)

    @classmethod
    def parse(cls, spec: str) -> Cluster:
        """Read ``64xh100-sxm``, ``h100-sxm`` (one) or a path to a cluster file.

        Raises:
            InvalidInput: unknown device (the close ones are named) or count.
        """
        if spec.endswith(".toml"):
            return cls.load(spec)
        match = re.fullmatch(r"(?:(\d+)\s*x\s*)?([A-Za-z0-9][\w.-]*)", spec.strip())
        if match is None:
            raise InvalidInput(
                "cluster", repr(spec), "is no cluster", "write e.g. 8xh100-sxm, or a path to a .toml file"
            )
        table = _entry(match[2].lower())
        if table is None:
            raise InvalidInput(
                "cluster.device",
                match[2],
                "is not in the catalogue",
                f"use {', '.join(device_names())}, or a .toml file",
            )
        return cls.from_dict({"device": table, **table}).resized(int(match[1] or 1))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Cluster:
        """Read a cluster file, as `loadmaster measure` writes it.

        Raises:
            InvalidInput: the file is missing, no TOML, or lacks a field.
        """
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InvalidInput(
                "cluster", str(path), f"cannot be read ({error})", "give a file that loadmaster measure wrote"
            ) from None
        device = data.get("device")
        known = [f.name for f in fields(Device)]
        for name in device if isinstance(device, Mapping) else ():
            if name not in known:
                raise InvalidInput("cluster.device", name, "is no field of a device", f"use {', '.join(known)}")
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cluster:
        """Build from the parsed TOML of a cluster file.

        Raises:
            InvalidInput: a field is missing or holds what it may not.
        """
        links = {tier: _link(data, tier) for tier in ("intra_node", "inter_node")}
        domain = data.get("link_domain")
        return cls(
            device=_device(given("cluster", data, "device", see=_SEE)),
            devices_per_node=given("cluster", data, "devices_per_node", see=_SEE),
            num_nodes=data.get("num_nodes", 1),
            memory_cap=_bytes("cluster.memory_cap", data["memory_cap"]) if data.get("memory_cap") is not None else None,
            source=str(data.get("source", "")), link_domain=domain, **links,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` reads: the tables of a cluster file."""
        device = self.device
        return {
            "devices_per_node": self.devices_per_node,
            "num_nodes": self.num_nodes,
            "link_domain": self.link_domain,
            "memory_cap": self.memory_cap,
            "source": self.source,
            "device": {
                "name": device.name,
                "memory_bytes": device.memory_bytes,
                "memory_bandwidth": device.memory_bandwidth,
                "source": device.source,
                "price_per_hour": device.price_per_hour,
                "measured": device.measured,
                "peak_flops": dict(device.peak_flops),
            },
            **{
                tier: {f.name: getattr(link, f.name) for f in fields(link)}
                for tier, link in (("intra_node", self.intra_node), ("inter_node", self.inter_node))
            },
        }


def _device(table: Any) -> Device:
    """The device of a cluster file; integers may stand where a rate is meant."""
    field = "cluster.device"
    peaks = table.get("peak_flops", {}) if isinstance(table, Mapping) else {}
    if not isinstance(peaks, Mapping):
        raise InvalidInput(f"{field}.peak_flops", repr(peaks), "is not a table", _SEE)
    return Device(
        name=str(given(field, table, "name", see=_SEE)),
        memory_bytes=_bytes(f"{field}.memory_bytes", given(field, table, "memory_bytes", see=_SEE)),
        memory_bandwidth=real(f"{field}.memory_bandwidth", given(field, table, "memory_bandwidth", see=_SEE), above=0),
        peak_flops={str(k): real(f"{field}.peak_flops.{k}", v, above=0) for k, v in peaks.items()},
        source=str(table.get("source", "")),
        price_per_hour=table.get("price_per_hour"),
        measured=table.get("measured", False),
    )


def _link(data: Mapping[str, Any], tier: str) -> Link:
    field, table = f"cluster.{tier}", given("cluster", data, tier, see=_SEE)
    return Link(
        latency=real(f"{field}.latency", given(field, table, "latency", see=_SEE)),
        bandwidth=real(f"{field}.bandwidth", given(field, table, "bandwidth", see=_SEE), above=0),
        name=str(table.get("name", "")),
        gamma=real(f"{field}.gamma", table.get("gamma", 0.0)),
    )


def _bytes(field: str, value: object) -> int:
    """A whole number, or a text with a unit."""
    return whole(field, parse_count(value, field=field) if isinstance(value, str) else value)


@cache
def _sections() -> dict[str, str]:
    """The catalogue's text by device: a command that asks for one device parses one table."""
    text = Path(__file__).with_name("catalog").joinpath("devices.toml").read_text(encoding="utf-8")
    parts = re.split(r"(?m)^\[([^\].]+)\]", text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _entry(name: str) -> dict[str, Any] | None:
    section = _sections().get(name)
    return None if section is None else tomllib.loads(section)


def device_names() -> tuple[str, ...]:
    """Names in the catalogue."""
    return tuple(_sections())
