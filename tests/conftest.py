"""Runs a program of `programs/` as several Gloo ranks and returns what each printed as JSON."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton: kernels run on the CPU here

HERE = Path(__file__).parent
collect_ignore_glob = ["programs/*"]


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[Any]]:
    def run(program: str, num_ranks: int, *args: str, timeout: float = 120, codes: bool = False) -> list[Any]:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        env = {
            **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks),
            "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE / "programs"), *sys.path]),
        }  # fmt: skip
        started = [
            subprocess.Popen(
                [sys.executable, str(HERE / "programs" / program), *args],
                env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True,
            )
            for r in range(num_ranks)
        ]  # fmt: skip
        try:
            ended = [p.communicate(timeout=timeout) for p in started]
        finally:
            for p in started:
                p.kill()
        if not codes:
            for p, (_, err) in zip(started, ended, strict=True):
                assert p.returncode == 0, err[-3000:]
        found = [json.loads(out.splitlines()[-1]) if out.strip() else None for out, _ in ended]
        return [(p.returncode, f) for p, f in zip(started, found, strict=True)] if codes else found

    return run
