"""A tiny language model, its data, and how to collect an engine's state from all ranks."""

import json
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from loadmaster.runtime import Engine, StateShard

VOCAB, WIDTH, TOKENS = 67, 24, 12


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tiny(nn.Module):
    def __init__(self, num_blocks: int = 3, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tiny(seed: int = 0, **options: object) -> Tiny:
    torch.manual_seed(seed)
    return Tiny(**options)


def sequences(step: int, count: int) -> list[dict[str, Tensor]]:
    """`count` sequences of one step; each ignores another number of leading tokens."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for _ in range(count):
        ids = torch.randint(0, VOCAB, (1, TOKENS), generator=generator)
        labels = ids.clone()
        labels[:, : int(torch.randint(0, TOKENS - 2, (1,), generator=generator))] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def batched(items: list[dict[str, Tensor]], size: int) -> list[dict[str, Tensor]]:
    groups = [items[i : i + size] for i in range(0, len(items), size)]
    return [{k: torch.cat([item[k] for item in group]) for k in group[0]} for group in groups]


def whole(shards: Iterator[StateShard]) -> dict[tuple[str, str], Tensor]:
    """Every rank's shards put together; NaN where nobody had an element, and an error where two had."""
    mine = [(s.name, s.kind, s.full_shape, s.start, s.stop, s.tensor.detach().clone()) for s in shards]
    parts = [mine]
    if dist.is_initialized():
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
    found: dict[tuple[str, str], Tensor] = {}
    for name, kind, shape, start, stop, tensor in (row for part in parts for row in part):
        numel = torch.Size(shape).numel()
        full = found.setdefault((name, kind), torch.full((numel,), float("nan"), dtype=torch.float64))
        assert full[start:stop].isnan().all(), f"{name} {kind}: written twice"
        full[start:stop] = tensor.double()
    assert not any(t.isnan().any() for t in found.values()), "a range is missing"
    return found


def difference(a: dict[tuple[str, str], Tensor], b: dict[tuple[str, str], Tensor], kind: str) -> float:
    """|a - b| / |b| (Euclidean): the worst tensor's of gradients; over all tensors together of anything else."""
    keys = [k for k in b if k[1] == kind]
    assert keys
    assert {k for k in a if k[1] == kind} == set(keys)
    if kind == "grad":
        return max(float((a[k] - b[k]).norm() / b[k].norm().clamp_min(1e-30)) for k in keys)
    return float(torch.cat([a[k] - b[k] for k in keys]).norm() / torch.cat([b[k] for k in keys]).norm())


def start() -> tuple[int, int]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def finish(result: object, *engines: Engine) -> None:
    for engine in engines:
        engine.close()
    print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()
