"""The audit of a plan file or a factory: its model built here, shortened where it must be, on real or random tokens."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loadmaster.describe.model import Model
from loadmaster.describe.plan_file import PlanFile
from loadmaster.describe.precision import Precision
from loadmaster.describe.require import real, whole
from loadmaster.errors import InvalidInput
from loadmaster.runtime.audit import Audit, Batch, audit
from loadmaster.runtime.modules import build_module, vocab_size
from loadmaster.units import format_bytes

__all__ = ["audit_plan", "short_config"]

BYTES_PER_PARAM = 24  # fp32 weight, gradient, two moments, the weight before the step, and its update
LAYER_FIELDS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def audit_plan(
    target: str | PathLike[str], *, steps: int = 3, seq_len: int | None = None, batch_size: int | None = None,
    layers: int | None = None, data: str | None = None, seed: int = 0, precision: Precision | str | None = None,
    lr: float = 3e-4, eps: float = 1e-8, weight_decay: float = 0.01, init_scale: float = 2.0**16,
) -> Audit:  # fmt: skip
    """Audit a plan file, or ``package.module:factory``.

    Args:
        target: the plan, or a factory that returns a module, or a module, its batches and (perhaps) its optimizer.
        seq_len, batch_size: of the audited steps; the plan's (at most 512 tokens, 4 sequences) where None.
        layers: audit a model of this many layers instead of the plan's.
        data: text to audit on (as `train` takes it); random tokens where None.
        precision: instead of the plan's. init_scale: of dynamic loss scaling.
    """
    whole("--steps", steps)
    for option, count in (("--seq", seq_len), ("--batch", batch_size)):
        if count is not None:
            whole(option, count)
    for option, number in (("--lr", lr), ("--init-scale", init_scale)):
        real(option, number, above=0)
    for option, number in (("--eps", eps), ("--weight-decay", weight_decay)):
        real(option, number)
    torch.manual_seed(seed)
    options: dict[str, Any] = {
        "steps": steps, "lr": lr, "eps": eps, "weight_decay": weight_decay, "init_scale": init_scale,
    }  # fmt: skip
    if _is_factory(target):
        module, batches, optimizer = _made(str(target), seq_len or 128, batch_size or 2, data, seed)
        return audit(module, batches, precision=precision or "bf16-mixed", optimizer=optimizer, **options)
    plan = PlanFile.load(target)
    name = precision or plan.layout.precision
    if isinstance(name, str):
        Precision.named(name)
    seq_len = seq_len or min(plan.workload.seq_len, 512)
    batch_size = batch_size or min(plan.workload.global_batch_size, 4)
    config = None if plan.config is None else short_config(dict(plan.config), layers)
    if config is not None:
        _check_room(config)
    module = build_module(config=config, factory=plan.factory, seed=seed)
    return audit(module, _batches(module, seq_len, batch_size, steps, data, seed), precision=name, **options)


def _is_factory(target: str | PathLike[str]) -> bool:
    text = os.fspath(target)
    return ":" in text and not Path(text).exists()


def short_config(config: dict[str, Any], layers: int | None) -> dict[str, Any]:
    """The config with fewer layers.

    >>> short_config({"n_layer": 48, "layer_types": ["a"] * 48}, 2)
    {'n_layer': 2, 'layer_types': ['a', 'a']}
    """
    if layers is None:
        return config
    if layers < 1:
        raise InvalidInput("--layers", layers, "must be at least 1", "leave it out to audit the whole model")
    short = dict(config)
    for field in LAYER_FIELDS:
        if field in short:
            short[field] = min(layers, int(short[field]))
    if isinstance(short.get("text_config"), dict):
        short["text_config"] = short_config(short["text_config"], layers)
    if isinstance(short.get("layer_types"), list):
        short["layer_types"] = short["layer_types"][:layers]
    return short


def _check_room(config: dict[str, Any]) -> None:
    """Refuse what this machine cannot hold, before it is built."""
    needed = Model.from_hf(config).num_params * BYTES_PER_PARAM
    free = _free_bytes()
    if needed > free:
        raise InvalidInput(
            "model", format_bytes(needed), f"is more than the {format_bytes(free)} free here",
            "audit a shorter model with --layers 2: layers are alike",
        )  # fmt: skip


def _free_bytes() -> int:
    """Memory that can be had without swapping: what Linux estimates, elsewhere the pages that nothing uses."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _batches(
    module: nn.Module, seq_len: int, batch_size: int, steps: int, data: str | None, seed: int
) -> Sequence[Batch]:
    if data is None:
        made = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, vocab_size(module), (steps, batch_size, seq_len), generator=made)
        return [{"input_ids": part, "labels": part.clone()} for part in ids]
    import tempfile

    from loadmaster.runtime.data import open_sequences

    with tempfile.TemporaryDirectory(prefix="loadmaster-audit-") as folder:
        sequences, _ = open_sequences(
            data, "bytes", Path(folder), seq_len=seq_len, vocab_size=vocab_size(module), seed=seed
        )
        windows = [
            sequences.window(s, global_batch_size=batch_size, data_rank=0, dp=1, micro_batch_size=batch_size)
            for s in range(steps)
        ]
        return [window[0] for window in windows]


def _made(
    factory: str, seq_len: int, batch_size: int, data: str | None, seed: int
) -> tuple[nn.Module, Sequence[Batch], torch.optim.Optimizer | None]:
    """What a factory returns: a module, or (module, batch), or (module, [batches]), an optimizer as a third or not."""
    name, _, attribute = factory.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(name), attribute)()
    except (ImportError, AttributeError) as error:
        raise InvalidInput("model", factory, f"cannot be called ({error})", "write package.module:function") from None
    finally:
        sys.path.remove(os.getcwd())
    if isinstance(made, nn.Module):
        return made, _batches(made, seq_len, batch_size, 3, data, seed), None
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module):
        single = isinstance(made[1], dict | Tensor)
        return made[0], [made[1]] if single else list(made[1]), made[2] if len(made) == 3 else None
    raise InvalidInput("model", factory, "returned no module", "return a module, or a module and its batches")
