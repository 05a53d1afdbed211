"""A rank's place in the run: rendezvous under our own launcher or torchrun, and the agreed stop.

Local ranks are started by `loadmaster.ranks`; here is what each of them, or each of torchrun's, does first.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from loadmaster.errors import InvalidInput, LoadmasterError

__all__ = ["Member", "StopRequest", "join_run", "restart_count", "under_torchrun"]

RENDEZVOUS_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """This process among the ranks.

    Attributes:
        rank, world_size, local_rank: as torchrun numbers them.
        device: where its tensors lie.
        store: key-value store that every rank of this attempt sees.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    store: Store

    @property
    def first(self) -> bool:
        """Whether it is the rank that prints and writes what is written once."""
        return self.rank == 0


def under_torchrun() -> bool:
    """Whether torchrun (or a scheduler that sets the same variables) started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def restart_count() -> int:
    """How often torchrun has restarted this run."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@contextmanager
def join_run(*, device: str = "auto", timeout_seconds: float = 600.0) -> Iterator[Member]:
    """Rendezvous with the other ranks, start torch.distributed, and leave it at the end.

    A process without torchrun's variables is a run of one rank.

    Args:
        device: ``cpu``, ``cuda`` or ``auto`` (cuda where there is one for every local rank).
        timeout_seconds: of a collective; a peer that is killed is noticed at once, this ends a hang.
    """
    rank, world_size = _integer("RANK", 0), _integer("WORLD_SIZE", 1)
    local_rank = _integer("LOCAL_RANK", 0)
    if not 0 <= rank < world_size:
        raise InvalidInput("RANK", rank, f"is not below WORLD_SIZE = {world_size}", "start the ranks with torchrun")
    place = _device(device, local_rank)
    store = _own_store(rank, world_size)
    backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=PrefixStore("group", store), rank=rank, world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )  # fmt: skip
    try:
        yield Member(rank=rank, world_size=world_size, local_rank=local_rank, device=place, store=store)
    finally:
        dist.destroy_process_group()


def _integer(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.lstrip("-").isdigit():
        raise InvalidInput(name, text, "is not a whole number", "start the ranks with torchrun")
    return int(text)


def _device(wanted: str, local_rank: int) -> torch.device:
    if wanted not in ("auto", "cpu", "cuda"):
        raise InvalidInput("device", wanted, "is not known", "use cpu, cuda or auto")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and available <= local_rank):
        return torch.device("cpu")
    if available <= local_rank:
        raise InvalidInput("device", "cuda", f"rank {local_rank} of this host has none ({available} found)", "use cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _own_store(rank: int, world_size: int) -> Store:
    """A store that lives and dies with this attempt.

    torchrun's agent lends its workers one store for all restarts; after a killed rank its stale keys fail the next
    rendezvous now and then (unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1). So the agent's store carries one thing
    only, the address of a store that rank 0 opens anew, and a rank that read a dead address reads again.
    """
    if world_size == 1:
        return HashStore()
    address, port = os.environ["MASTER_ADDR"], _integer("MASTER_PORT", 0)
    timeout = timedelta(seconds=RENDEZVOUS_SECONDS)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return TCPStore(address, port, world_size, rank == 0, timeout)
    agent = TCPStore(address, port, is_master=False, timeout=timeout)
    key = f"loadmaster/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{restart_count()}"
    if rank == 0:
        own = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        agent.set(key, f"{_own_address(address)} {own.port}")
        return own
    return _follow(agent, key, timeout)


def _own_address(master: str) -> str:
    """This host as the other ranks reach it: the address of the interface that leads to the master."""
    with socket.socket(socket.AF_INET6 if ":" in master else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))
        return str(probe.getsockname()[0])


def _follow(agent: Store, key: str, timeout: timedelta) -> Store:
    """Connect to the store whose address rank 0 published, trying again while the address is an old one."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        host, port = agent.get(key).decode().split()
        try:
            with socket.create_connection((host, int(port)), timeout=2.0):
                pass
            return TCPStore(host, int(port), is_master=False, timeout=timeout)
        except (OSError, RuntimeError):
            if time.monotonic() > deadline:
                raise LoadmasterError(f"rendezvous: rank 0 cannot be reached at {host}:{port}") from None
            time.sleep(0.2)


class StopRequest:
    """Ctrl-C, SIGTERM or a scheduler's warning, agreed by every rank on one step without a collective.

    A signalled rank, before its step s, writes ``stop = s + 1`` to the store and does step s. Step s holds a
    collective, so nobody ends it before that rank began it: every rank finds the key before step s + 1, and stops.
    """

    def __init__(self, member: Member) -> None:
        self.store, self.step, self.wanted = member.store, 0, False
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        self.previous = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, _number: int, _frame: object) -> None:
        self.wanted = True

    def before(self, step: int) -> bool:
        """Whether to stop instead of starting `step`; called by every rank before every step."""
        if self.wanted:
            self.store.compare_set("stop", "", str(step + 1))
        if not self.store.check(["stop"]):
            return False
        return step >= int(self.store.get("stop").decode())
