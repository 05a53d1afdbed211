"""Ranks of a run forked from a process that has imported torch already: a run of four ranks in half a second."""

import multiprocessing
import os
import traceback
from pathlib import Path
from typing import Any

TINY = '''
import os, torch
from torch import nn

class Tiny(nn.Module):
    """Tensors of sizes that no number of ranks divides: a 7 x 13 and a 13 x 7 matrix, a vector of 1001."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 13)
        drop = nn.Dropout(float(os.environ.get("TINY_DROPOUT", "0")))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(13, 7), nn.Tanh(), drop, nn.Linear(7, 13)) for _ in range(2)
        )
        self.vector = nn.Parameter(torch.linspace(-1, 1, 1001))
        self.head = nn.Linear(13, 256)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x * (1 + self.vector.square().mean()))

def make():
    return Tiny()
'''


def write_inputs(folder: Path) -> None:
    """The model's file and some text, into `folder`."""
    (folder / "tiny_model.py").write_text(TINY)
    (folder / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(400)))


def _rank(results: Any, rank: int, folder: str, payload: dict[str, Any], environment: dict[str, str]) -> None:
    from loadmaster.errors import LoadmasterError
    from loadmaster.runtime.train import train_rank

    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(folder)
    try:
        results.put((rank, train_rank(payload)))
    except LoadmasterError as error:
        results.put((rank, error))
    except BaseException:
        results.put((rank, RuntimeError(f"rank {rank}: {traceback.format_exc()}")))
    os._exit(0)


def train_forked(payload: dict[str, Any], *, world_size: int, folder: Path, **environment: str) -> Any:
    """What rank 0's `train_rank` returned."""
    from loadmaster.ranks import free_port

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["loadmaster.runtime.train", "torch._dynamo"])
    common = {
        "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **environment,
    }  # fmt: skip
    results = context.SimpleQueue()
    ranks = [context.Process(target=_rank, args=(results, r, str(folder), payload, common)) for r in range(world_size)]
    for process in ranks:
        process.start()
    try:
        found = dict(results.get() for _ in ranks)
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    for outcome in found.values():
        if isinstance(outcome, Exception):
            raise outcome
    return found[0]


def plan_payload(out: str, *, layout: str, steps: int = 10, **given: Any) -> dict[str, Any]:
    """The JSON of a run of the tiny model."""
    from loadmaster.describe.layout import Layout
    from loadmaster.describe.workload import Workload
    from loadmaster.runtime.run import Run

    return Run(
        factory="tiny_model:make", layout=Layout.parse(f"precision=fp32,micro_batch_size=1,{layout}"), data="text.txt",
        workload=Workload(global_batch_size=12, seq_len=16), out=out, steps=steps, lr=1e-2, warmup=2, quiet=True,
        tensorboard=False, device="cpu", **given,
    ).to_json()  # fmt: skip
