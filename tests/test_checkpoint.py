"""Checkpoints: free of the layout, whole whatever happens, verified."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loadmaster.errors import InvalidInput
from loadmaster.runtime.checkpoint import Checkpoint
from loadmaster.runtime.save import Saver
from loadmaster.runtime.whole import latest_checkpoint, list_checkpoints

SHAPES = {"vector": (1001,), "matrix": (7, 13), "scalar": ()}  # sizes that no number of ranks divides


@dataclass(frozen=True)
class Range:
    name: str
    kind: str
    full_shape: tuple[int, ...]
    start: int
    stop: int
    tensor: Tensor


def value(name: str, kind: str, step: int = 0) -> Tensor:
    numel = torch.Size(SHAPES[name]).numel()
    return torch.arange(numel, dtype=torch.float32) + 10_000 * step + 0.5 * (kind == "exp_avg")


def shards(rank: int, world_size: int, *, replicated: bool = False, step: int = 0) -> Iterator[Range]:
    for name, shape in SHAPES.items():
        numel = torch.Size(shape).numel()
        for kind in ("param", "exp_avg"):
            low, high = (numel * r // world_size for r in (rank, rank + 1))
            if replicated and kind == "param":
                low, high = 0, numel
            yield Range(name, kind, shape, low, high, value(name, kind, step)[low:high])


def save_on_ranks(payload: dict) -> None:
    """What each rank of the test below runs."""
    from loadmaster.runtime.launch import join_run

    with join_run(device="cpu") as member:
        for asynchronous in (False, True):
            saver = Saver(Path(payload["folder"]) / str(asynchronous), asynchronous=asynchronous)
            saver.save(5, shards(member.rank, member.world_size, replicated=True), {"seed": 1})
            saver.finish()


@pytest.mark.ranks
def test_saved_on_three_ranks_read_in_any_ranges(tmp_path: Path) -> None:
    from loadmaster.ranks import run_ranks

    environment = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    run_ranks(f"{Path(__file__).stem}:save_on_ranks", {"folder": str(tmp_path)}, world_size=3, environment=environment)
    for form in ("False", "True"):
        folder = latest_checkpoint(tmp_path / form)
        assert folder is not None
        saved = Checkpoint.open(folder)
        assert (saved.step, saved.run) == (5, {"seed": 1})
        assert len(list(folder.glob("*.safetensors"))) == 3
        written = [path.stat().st_size for path in folder.glob("*.safetensors")]
        assert max(written) < 0.75 * sum(written), "the ranks share the work"
        for world_size in (1, 2, 5):
            for rank in range(world_size):
                for want in shards(rank, world_size):
                    got = saved.read(want.name, want.kind, want.start, want.stop)
                    assert got is not None
                    assert torch.equal(got, want.tensor)
        assert saved.read("vector", "exp_avg_sq", 0, 5) is None
        assert torch.equal(saved.whole("matrix"), value("matrix", "param").view(7, 13))


def test_keeps_the_newest_and_saves_a_step_twice(tmp_path: Path) -> None:
    saver = Saver(tmp_path, keep=2)
    for step in (1, 2, 3, 3):
        saver.save(step, shards(0, 1, step=step), {})
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000003", "step-00000003.1"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000003.1"
    (tmp_path / "latest").write_text("step-00000099\n")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000003.1"


def test_damage_is_found(tmp_path: Path) -> None:
    Saver(tmp_path).save(1, shards(0, 1), {})
    folder = tmp_path / "step-00000001"
    file = folder / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    opened = Checkpoint.open(folder)
    with pytest.raises(InvalidInput, match="is damaged"):
        [opened.read(part.name, part.kind, part.start, part.stop) for part in shards(0, 1)]
    manifest = folder / "checkpoint.json"
    body = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**body, "step": 7}))
    with pytest.raises(InvalidInput, match="its checksum is wrong"):
        Checkpoint.open(folder)
    manifest.write_text("{")
    with pytest.raises(InvalidInput, match="no JSON"):
        Checkpoint.open(folder)
    with pytest.raises(InvalidInput, match="holds none"):
        Checkpoint.open(tmp_path / "nowhere")


def test_a_state_with_a_hole_is_not_saved(tmp_path: Path) -> None:
    from loadmaster.errors import LoadmasterError

    with pytest.raises(LoadmasterError, match="no rank holds elements"):
        Saver(tmp_path).save(1, shards(0, 2), {})
    assert latest_checkpoint(tmp_path) is None


SAVE_FOREVER = """
import sys; sys.path.insert(0, {tests!r})
from test_checkpoint import Saver, shards, Path
saver, step = Saver(Path({folder!r}), keep=2), {first}
while True:
    step += 1
    saver.save(step, shards(0, 1, step=step), {{"step": step}})
    print(step, flush=True)
"""


def test_a_kill_during_a_save_never_loses_a_checkpoint(tmp_path: Path) -> None:
    chance, done = random.Random(4), 0
    for _ in range(3):
        code = SAVE_FOREVER.format(tests=str(Path(__file__).parent), folder=str(tmp_path), first=done)
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(chance.uniform(0.0, 0.05))
        writer.send_signal(signal.SIGKILL)
        said = writer.stdout.read().split()
        writer.wait()
        folder = latest_checkpoint(tmp_path)
        assert folder is not None
        saved = Checkpoint.open(folder)
        assert saved.step >= int(said[-1]) if said else saved.step > done
        for part in shards(0, 1, step=saved.step):
            got = saved.read(part.name, part.kind, part.start, part.stop)
            assert got is not None
            assert torch.equal(got, part.tensor)
        done = saved.step
