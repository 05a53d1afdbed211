"""Local ranks: start them, watch them, end them together; the cause of a failure is told once, by rank.

No torch here: a rank is a Python process that runs ``package.module:function`` on a JSON payload, with the
environment that ``torchrun`` would give it (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from loadmaster.errors import LoadmasterError

__all__ = ["Interrupted", "RankFailed", "free_port", "run_ranks"]

POLL_SECONDS = 0.05
SETTLE_SECONDS = 0.5  # after a first failure: the others' reports tell the cause from its consequences
GRACE_SECONDS = 3.0  # between asking a rank to end and ending it
CONSEQUENCES = ("connection closed", "connection reset", "peer", "timed out", "timeout", "broken pipe", "unreachable")


class RankFailed(LoadmasterError):
    """A rank died or raised; the run ended. Carries the rank's own exit status."""

    exit_status = 1

    def __init__(self, message: str, *, rank: int, exit_status: int = 1) -> None:
        self.rank, self.exit_status = rank, exit_status
        super().__init__(message)


class Interrupted(LoadmasterError):
    """The user stopped the run; what was asked of the ranks (a checkpoint) is done."""

    exit_status = 130


@dataclass(slots=True)
class _Rank:
    """One started process."""

    rank: int
    process: subprocess.Popen[bytes]
    report: Path
    log: Path | None
    ended: bool = field(default=False)

    def result(self) -> dict[str, Any]:
        """What it wrote at its end; empty if it was killed first."""
        try:
            loaded: dict[str, Any] = json.loads(self.report.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return loaded


def free_port() -> int:
    """A TCP port of this host that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    target: str,
    payload: Mapping[str, Any],
    *,
    world_size: int,
    threads: int | None = None,
    log_dir: Path | None = None,
    hint: str = "",
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``target(payload)`` on `world_size` local processes and return what each rank returned.

    Args:
        target: ``package.module:function``.
        payload: JSON-able argument.
        world_size: processes to start.
        threads: OpenMP threads a rank; the cores shared out where None.
        log_dir: where the output of a rank that failed is kept (rank 0 writes to this terminal).
        hint: sentence added to the message of a failure.
        environment: further variables of the ranks.

    Raises:
        RankFailed: a rank died or raised; one message names it.
        Interrupted: Ctrl-C or SIGTERM reached this process and the ranks ended in order.
    """
    with tempfile.TemporaryDirectory(prefix="loadmaster-") as folder:
        (Path(folder) / "payload.json").write_text(json.dumps(payload), encoding="utf-8")
        ranks = _start(target, Path(folder), world_size, threads, environment or {})
        with _Signals(ranks) as signals:
            try:
                failed = _watch(ranks)
            finally:
                _end(ranks)
        results = [rank.result() for rank in ranks]
        if signals.received > 1 or any(result.get("exit_status") == Interrupted.exit_status for result in results):
            said = "ended at once" if signals.received > 1 else str(results[0].get("error", "interrupted"))
            raise Interrupted(f"{said}{'; ' + hint if hint else ''}")
        if failed:
            raise _failure(ranks, failed, hint, log_dir)
        return [result.get("ok") for result in results]


def _start(target: str, folder: Path, world_size: int, threads: int | None, extra: Mapping[str, str]) -> list[_Rank]:
    threads = threads or max(1, (os.cpu_count() or 1) // world_size)
    common = {
        **os.environ, "OMP_NUM_THREADS": str(threads), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "LOADMASTER_FOLDER": str(folder),
        "TOKENIZERS_PARALLELISM": "false", **extra,
    }  # fmt: skip
    ranks = []
    for rank in range(world_size):
        env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        log = None if rank == 0 else folder / f"rank-{rank}.log"
        out: Any = None if log is None else log.open("wb")
        process = subprocess.Popen(
            [sys.executable, "-m", "loadmaster.ranks", target],
            env=env, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
        if log is not None:
            out.close()
        ranks.append(_Rank(rank, process, folder / f"rank-{rank}.json", log))
    return ranks


def _watch(ranks: list[_Rank]) -> list[_Rank]:
    """Wait for every rank; at the first failure wait a moment more and return those that failed by then."""
    while True:
        states = [(rank, rank.process.poll()) for rank in ranks]
        if any(code not in (None, 0) for _, code in states):
            time.sleep(SETTLE_SECONDS)
            return [rank for rank in ranks if rank.process.poll() not in (None, 0)]
        if all(code == 0 for _, code in states):
            return []
        time.sleep(POLL_SECONDS)


def _end(ranks: list[_Rank]) -> None:
    """End what still runs: ask, then insist."""
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.kill() if rank.ended else rank.process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
        if rank.process.stdin is not None:
            rank.process.stdin.close()


def _failure(ranks: list[_Rank], failed: list[_Rank], hint: str, log_dir: Path | None) -> RankFailed:
    """The one message: a killed rank first, then a rank whose error is its own, then whoever failed."""

    def order(rank: _Rank) -> tuple[int, int]:
        if rank.process.returncode < 0:
            return 0, rank.rank
        message = str(rank.result().get("error", "")).lower()
        own = bool(message) and not any(sign in message for sign in CONSEQUENCES)
        return (1 if own else 2), rank.rank

    first = min(failed, key=order)
    code, report = first.process.returncode, first.result()
    where = f"rank {first.rank} of {len(ranks)} (process {first.process.pid})"
    if code < 0:
        name = signal.Signals(-code).name
        more = " (out of memory?)" if name == "SIGKILL" else ""
        message = f"{where} was killed by {name}{more}; the other ranks were ended"
    elif report.get("user"):
        trace = _keep_trace(first, log_dir)
        more = f"{trace}; {hint}" if trace and hint else trace
        return RankFailed(f"{report['error']}{more}", rank=first.rank, exit_status=int(report.get("exit_status", 1)))
    else:
        message = f"{where} failed: {report.get('error', f'exit status {code}')}; the other ranks were ended"
        message += _keep_trace(first, log_dir)
    return RankFailed(f"{message}{'; ' + hint if hint else ''}", rank=first.rank)


def _keep_trace(rank: _Rank, log_dir: Path | None) -> str:
    """Save where an error in code came from, if that is known; a sentence that says where."""
    trace = rank.report.with_suffix(".traceback")
    if log_dir is None or not trace.is_file():
        return ""
    log_dir.mkdir(parents=True, exist_ok=True)
    kept = log_dir / trace.name
    kept.write_text(trace.read_text(encoding="utf-8"), encoding="utf-8")
    return f"; its traceback: {kept}"


class _Signals:
    """Hands Ctrl-C and SIGTERM on to the ranks; a second one ends them at once."""

    def __init__(self, ranks: list[_Rank]) -> None:
        self.ranks, self.received, self.previous = ranks, 0, {}  # type: tuple[list[_Rank], int, dict[int, Any]]

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            self.previous = {s: signal.signal(s, self.handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def handle(self, number: int, _frame: object) -> None:
        self.received += 1
        if self.received == 1:
            print("\nloadmaster: stopping after this step; once more to end at once", file=sys.stderr)
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.ended = self.received > 1
                rank.process.send_signal(signal.SIGINT if self.received == 1 else signal.SIGKILL)


def _follow_parent() -> None:
    """End this rank when the process that started it is gone: its end of our stdin closes."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _main(target: str) -> int:
    """What a started process runs."""
    folder, rank = Path(os.environ["LOADMASTER_FOLDER"]), os.environ["RANK"]
    report: dict[str, Any] = {}
    status = 0
    _follow_parent()
    try:
        module, _, function = target.partition(":")
        payload = json.loads((folder / "payload.json").read_text(encoding="utf-8"))
        report["ok"] = getattr(import_module(module), function)(payload)
    except LoadmasterError as error:
        report.update(error=str(error), user=True, exit_status=error.exit_status)
        status = error.exit_status
        if trace := getattr(error, "trace", ""):  # an error of the user's own code, told by the rank that ran it
            (folder / f"rank-{rank}.traceback").write_text(trace, encoding="utf-8")
    except KeyboardInterrupt:
        report.update(error="interrupted", user=True, exit_status=130)
        status = 130
    except BaseException as error:
        report["error"] = f"{type(error).__name__}: {error}"
        (folder / f"rank-{rank}.traceback").write_text(traceback.format_exc(), encoding="utf-8")
        status = 1
    if folder.is_dir():
        part = folder / f"rank-{rank}.part"
        part.write_text(json.dumps(report), encoding="utf-8")
        part.rename(folder / f"rank-{rank}.json")
    return status


if __name__ == "__main__":
    code = _main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a peer may be gone: no collective clean-up that would wait for it
