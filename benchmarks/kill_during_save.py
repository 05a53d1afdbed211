"""Kill -9 a process that saves checkpoints, at random moments, and count what was lost: nothing may be.

    python benchmarks/kill_during_save.py [KILLS]

Each round starts a process that saves a state of 8 MiB over and over, kills it after a random time, then opens the
checkpoint that ``latest`` names and verifies every byte of it. Prints one JSON line.
"""

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from loadmaster.runtime.checkpoint import Checkpoint
from loadmaster.runtime.save import Saver
from loadmaster.runtime.whole import latest_checkpoint

NAMES = [f"layer.{i}" for i in range(64)]
NUMEL = 32_768


@dataclass(frozen=True)
class Part:
    name: str
    kind: str
    full_shape: tuple[int, ...]
    start: int
    stop: int
    tensor: Tensor


def state(step: int) -> list[Part]:
    base = torch.arange(NUMEL, dtype=torch.float32)
    return [Part(n, "param", (NUMEL,), 0, NUMEL, base + step + i) for i, n in enumerate(NAMES)]


def save_forever(folder: str, step: int) -> None:
    saver = Saver(Path(folder), keep=2, asynchronous=step % 2 == 1)
    while True:
        step += 1
        saver.save(step, state(step), {"step": step})
        print(step, flush=True)


def main(kills: int) -> None:
    chance, done, moments = random.Random(0), 0, []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(kills):
            command = [sys.executable, __file__, "--save", folder, str(done)]
            writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert writer.stdout is not None
            writer.stdout.readline()
            moments.append(chance.uniform(0.0, 0.3))
            time.sleep(moments[-1])
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            newest = latest_checkpoint(Path(folder))
            assert newest is not None, "lost"
            saved = Checkpoint.open(newest)
            assert saved.step >= done, (saved.step, done)
            for part in state(saved.step):
                assert torch.equal(saved.whole(part.name), part.tensor), part.name
            done = saved.step
    print(json.dumps({"kills": kills, "lost_or_damaged": 0, "last_step": done, "latest_kill_seconds": max(moments)}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--save"]:
        save_forever(sys.argv[2], int(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
