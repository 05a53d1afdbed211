"""8-bit AdamW on DTensors cut along their rows, against whole tensors; all ranks' files resume one process."""

import sys

import torch
import torch.distributed as dist
from tiny import finish, start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from loadmaster.errors import InvalidInput
from loadmaster.runtime import optim

SHAPES = {"matrix": (66, 256), "odd_rows": (67, 256), "vector": (300,), "cut": (67, 301)}
folder = sys.argv[1]
rank, size = start()
mesh = init_device_mesh("cpu", (size,))


def drawn(name: str, seed: int) -> torch.Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


def run(params, optimizer, place) -> None:
    for t in range(3):
        for name, p in params.items():
            p.grad = place(drawn(name, 100 + t))
        optimizer.step()


names = ("matrix", "odd_rows", "vector")
alone = {n: nn.Parameter(drawn(n, 0)) for n in names}
whole = optim.AdamW(list(alone.items()), state_bits=8)
run(alone, whole, lambda g: g)

cut = {n: nn.Parameter(distribute_tensor(drawn(n, 0), mesh, [Shard(0)])) for n in names}
parts = optim.AdamW(list(cut.items()), state_bits=8)
run(cut, parts, lambda g: distribute_tensor(g, mesh, [Shard(0)]))
equal = {n: torch.equal(cut[n].full_tensor(), alone[n]) for n in names}

optim.save_state(parts, f"{folder}/{rank}.safetensors")
dist.barrier()
back = optim.AdamW([(n, nn.Parameter(p.detach().clone())) for n, p in alone.items()], state_bits=8)
optim.load_state(back, [f"{folder}/{r}.safetensors" for r in range(size)])
states = zip(back.state.values(), whole.state.values(), strict=True)
equal["files"] = all(torch.equal(a[k], b[k]) for a, b in states for k in b)

refused = []
for name, placement in (("cut", Shard(0)), ("matrix", Shard(1))):
    p = nn.Parameter(distribute_tensor(drawn(name, 0), mesh, [placement]))
    try:
        optim.AdamW([(name, p)], state_bits=8)
    except InvalidInput as error:
        refused.append(str(error))
columns = nn.Parameter(distribute_tensor(drawn("matrix", 0), mesh, [Shard(1)]))
plain = optim.AdamW([("matrix", columns)], state_bits=32)
columns.grad = distribute_tensor(drawn("matrix", 1), mesh, [Shard(1)])
plain.step()
expected = drawn("matrix", 0) * (1 - 1e-5) - 1e-3 * torch.sign(drawn("matrix", 1))
equal["columns in 32 bits"] = torch.allclose(columns.full_tensor(), expected, atol=1e-5)
copy = nn.Parameter(distribute_tensor(drawn("cut", 0), mesh, [Replicate()]))
equal["replicated"] = optim.AdamW([("cut", copy)], state_bits=8).is_coded(copy)
finish({"equal": equal, "refused": refused})
