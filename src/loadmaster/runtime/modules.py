"""The module to train: a Hugging Face config with seeded random weights, or what ``package.module:factory`` returns."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn

from loadmaster.errors import InvalidInput

__all__ = ["build_module", "find_blocks", "vocab_size"]


def build_module(
    *, config: Mapping[str, Any] | None = None, factory: str | None = None, seed: int = 0, device: str = "cpu"
) -> nn.Module:
    """A module in training mode; the same seed gives the same weights on every rank.

    Args:
        config: a Hugging Face config of a causal language model.
        factory: ``package.module:function`` that takes nothing and returns a module with the forward of one.
        seed: of the weights.
        device: ``meta`` for shapes alone.

    Raises:
        InvalidInput: transformers cannot build the config, or the factory is not there or returns no module.
    """
    if (config is None) == (factory is None):
        raise InvalidInput("model", factory, "needs a config or a factory, not both", "give one")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with torch.device(device):
            module = _from_config(config) if config is not None else _from_factory(str(factory))
    return module.train()


def _from_config(config: Mapping[str, Any]) -> nn.Module:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a config is all there is to fetch, and it is here
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    fields = {k: v for k, v in config.items() if k not in ("model_type", "architectures", "torch_dtype", "dtype")}
    model_type = config.get("model_type")
    try:
        built = AutoConfig.for_model(model_type, **fields)
        built.use_cache = False
        module = AutoModelForCausalLM.from_config(built, attn_implementation="sdpa", dtype=torch.float32)
    except Exception as error:  # whatever a model class makes of a field it does not like
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidInput(
            "model.config", model_type, f"transformers builds no causal language model of it ({said})",
            "check the config, or give module:factory",
        ) from error  # fmt: skip
    assert isinstance(module, nn.Module)
    return module


def _from_factory(factory: str) -> nn.Module:
    name, _, attribute = factory.partition(":")
    if not name or not attribute:
        raise InvalidInput("model", factory, "is no factory", "write package.module:function")
    with _working_folder_importable():
        try:
            made = getattr(import_module(name), attribute)()
        except (ImportError, AttributeError) as error:
            raise InvalidInput(
                "model", factory, f"cannot be called ({error})", "check the name; it must import"
            ) from None
    if not isinstance(made, nn.Module):
        raise InvalidInput("model", factory, f"returned {type(made).__name__}", "return a torch.nn.Module")
    return made


@contextmanager
def _working_folder_importable() -> Iterator[None]:
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if added:
            sys.path.remove(here)


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The repeated layers by name, in order: the list of like modules that holds the most parameters.

    They are what is recomputed, gathered and freed as one.

    >>> body = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    >>> list(find_blocks(nn.ModuleDict({"body": body, "head": nn.Linear(2, 2)})))
    ['body.0', 'body.1', 'body.2']
    """

    def weight(layers: nn.Module) -> int:
        return sum(p.numel() for p in layers.parameters())

    lists = [
        (name, layers)
        for name, layers in module.named_modules()
        if isinstance(layers, (nn.ModuleList, nn.Sequential)) and len(layers) and not _is_inner(name, module)
    ]
    if not lists:
        return {}
    name, layers = max(lists, key=lambda item: weight(item[1]))
    prefix = f"{name}." if name else ""
    return {f"{prefix}{child}": layer for child, layer in layers.named_children()}


def _is_inner(name: str, module: nn.Module) -> bool:
    """Whether a list lies inside another list's element (the experts of a layer)."""
    parents = name.split(".")[:-1]
    above = (module.get_submodule(".".join(parents[:i])) for i in range(1, len(parents) + 1))
    return any(isinstance(parent, nn.ModuleList) for parent in above)


def vocab_size(module: nn.Module) -> int:
    """Ids that the module's embedding takes; a large number where it has none."""
    config = getattr(module, "config", None)
    if (named := getattr(config, "vocab_size", None)) is not None:
        return int(named)
    tables = [m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)]
    return max(tables, default=1 << 31)
