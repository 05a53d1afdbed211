"""What each rank of `verify` runs: the engine under the layout, and on rank 0 one plain process beside it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loadmaster.describe.layout import Layout
from loadmaster.describe.precision import Precision
from loadmaster.runtime import optim
from loadmaster.runtime.engine import StepResult, build
from loadmaster.runtime.launch import Member, join_run
from loadmaster.runtime.loss import CausalLanguageModel
from loadmaster.runtime.modules import build_module, vocab_size
from loadmaster.runtime.optimizer import OptimizerConfig
from loadmaster.runtime.state import StateShard
from loadmaster.runtime.verify import StepDifference

__all__ = ["verify_rank"]

WEIGHT_DECAY = 0.01
Item = dict[str, Tensor]


def verify_rank(payload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What every rank runs: the engine under the layout; rank 0 the reference as well. Rank 0 returns the rows."""
    layout = Layout(**payload["layout"])
    with join_run(device="cpu") as member:
        module = build_module(config=payload["config"], factory=payload["factory"], seed=payload["seed"])
        without_dropout(module)
        vocabulary = min(vocab_size(module), 1 << 20)
        reference = _Reference(copy.deepcopy(module), layout, payload) if member.first else None
        optimizer = OptimizerConfig(
            name=payload["optimizer"], lr=payload["lr"], state_bits=layout.optimizer_bits, weight_decay=WEIGHT_DECAY
        )
        rows = []
        with build(module, layout, optimizer=optimizer, device=torch.device("cpu")) as engine:
            for step in range(payload["steps"]):
                items = _sequences(layout, payload["seq_len"], vocabulary, seed=payload["seed"] * 1000 + step)
                result = engine.step(_window(items, layout, member.rank))
                gradients = _gathered(engine.gradients(), "grad", member)
                weights = _gathered(engine.state(), "param", member)
                if reference is not None:
                    rows.append(reference.compare(step, items, result, gradients, weights))
        return rows


def without_dropout(module: nn.Module) -> None:
    """Training mode for what depends on the batch, evaluation for the rest: masks differ from rank to rank."""
    module.train()
    for child in module.modules():
        if not isinstance(child, nn.modules.batchnorm._BatchNorm):
            child.training = False


def _sequences(layout: Layout, seq_len: int, vocabulary: int, *, seed: int) -> list[Item]:
    """Two micro-batches a rank, the last one short; each sequence ignores another number of tokens."""
    count = max(layout.dp, 2 * layout.dp * layout.micro_batch_size - 1)
    made = torch.Generator().manual_seed(seed)
    items = []
    for _ in range(count):
        ids = torch.randint(0, vocabulary, (1, seq_len), generator=made)
        labels = ids.clone()
        labels[:, : int(torch.randint(0, max(1, seq_len - 2), (1,), generator=made))] = -100
        items.append({"input_ids": ids, "labels": labels})
    return items


def _window(items: list[Item], layout: Layout, rank: int) -> list[Item]:
    """This data rank's micro-batches of the global batch."""
    low, high = (len(items) * r // layout.dp for r in (rank, rank + 1))
    mine, size = items[low:high], layout.micro_batch_size
    groups = (mine[i : i + size] for i in range(0, len(mine), size))
    return [{key: torch.cat([item[key] for item in group]) for key in group[0]} for group in groups]


def _gathered(shards: Iterator[StateShard], kind: str, member: Member) -> dict[str, Tensor]:
    """Whole tensors of one kind, put together on rank 0 from all ranks' flat ranges."""
    mine = [
        (s.name, tuple(s.full_shape), s.start, s.stop, s.tensor.detach().float().cpu().numpy().copy())
        for s in shards
        if s.kind == kind
    ]
    everyone: list[Any] | None = [None] * member.world_size if member.first else None
    dist.gather_object(mine, everyone, dst=0)
    whole: dict[str, Tensor] = {}
    for name, shape, start, stop, values in (row for rows in everyone or [] for row in rows):
        tensor = whole.setdefault(name, torch.zeros(shape))
        tensor.view(-1)[start:stop] = torch.from_numpy(values)
    return whole


def _plain_optimizer(name: str, parameters: list[nn.Parameter], *, lr: float) -> torch.optim.Optimizer:
    """PyTorch's own, or ours with 32-bit state where PyTorch has none (Lion)."""
    match name:
        case "sgd" | "sgd_momentum":
            momentum = 0.9 if name == "sgd_momentum" else 0.0
            return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=WEIGHT_DECAY)
        case "lion":
            return optim.Lion(parameters, lr=lr, betas=(0.9, 0.999), weight_decay=WEIGHT_DECAY)
    kinds: dict[str, Any] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}
    made: torch.optim.Optimizer = kinds[name](parameters, lr=lr, weight_decay=WEIGHT_DECAY)
    return made


class _Reference:
    """One process, plain PyTorch."""

    def __init__(self, module: nn.Module, layout: Layout, payload: Mapping[str, Any]) -> None:
        self.module, self.eight_bit = module, layout.optimizer_bits == 8
        self.compute = Precision.named(layout.precision).compute
        trained = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = _plain_optimizer(payload["optimizer"], trained, lr=payload["lr"])

    def compare(
        self, step: int, items: list[Item], result: StepResult, gradients: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
    ) -> dict[str, Any]:  # fmt: skip
        """Take the same step, and set the layout's against it."""
        loss, norm = self._step(items)
        parameters = dict(self.module.named_parameters())
        own = {n: p.grad for n, p in parameters.items() if p.grad is not None and n in gradients}
        differences = {n: float((gradients[n].view_as(g) - g).norm()) for n, g in own.items()}
        largest = max((float(g.norm()) for g in own.values()), default=0.0)
        worst = max(differences, key=lambda n: differences[n], default="nothing")
        self.optimizer.step()
        weight = self._weight_difference(weights)
        self._continue_from(weights)
        return asdict(
            StepDifference(
                step=step, loss=result.loss, reference_loss=loss, grad_norm=result.grad_norm, reference_grad_norm=norm,
                gradient=_relative(math.hypot(*differences.values()), norm), worst=worst, skipped=result.reason,
                worst_gradient=_relative(differences.get(worst, 0.0), largest),
                weight=None if self.eight_bit else weight,
            )
        )  # fmt: skip

    def _step(self, items: list[Item]) -> tuple[float, float]:
        """The whole batch in one forward; loss and gradient norm."""
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.compute)
        batch = {key: torch.cat([item[key] for item in items]) for key in items[0]}
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=half) if half else nullcontext():
            total, count = CausalLanguageModel()(self.module, batch)
        (total / count).backward()  # type: ignore[no-untyped-call]
        squares = (p.grad.double().square().sum() for p in self.module.parameters() if p.grad is not None)
        return float(total.detach() / count), math.sqrt(sum(float(s) for s in squares))

    def _continue_from(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self.module.named_parameters():
            if name in weights:
                parameter.data.copy_(weights[name].view_as(parameter))

    def _weight_difference(self, weights: Mapping[str, Tensor]) -> float:
        named = {n: p.detach() for n, p in self.module.named_parameters() if n in weights}
        apart = math.hypot(*(float((weights[n].view_as(p) - p).norm()) for n, p in named.items()))
        return _relative(apart, math.hypot(*(float(p.norm()) for p in named.values())))


def _relative(difference: float, size: float) -> float:
    return 0.0 if difference == 0 else difference / size if size else math.inf
