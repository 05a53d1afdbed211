"""A config of any model type that transformers knows: built without weights on the meta device, and counted.

The families written out in `describe` have their dataflow op by op; here every module that holds parameters becomes
one op of a chain, which gives exact counts and the products of each layer, not which tensors a stack keeps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from loadmaster.describe.families.flow import Flow
from loadmaster.describe.model import Block, Model
from loadmaster.describe.op import Attention, OpKind, Weight
from loadmaster.errors import InvalidInput

__all__ = ["model_from_config", "module_from_config"]


def module_from_config(raw: dict[str, Any]) -> nn.Module:
    """The module that the config's architecture names (a causal language model where it names none).

    Raises:
        InvalidInput: transformers knows no such model type, or refuses the config.
    """
    known = transformers.CONFIG_MAPPING
    model_type = str(raw.get("model_type"))
    if model_type not in known:
        raise InvalidInput(
            "config.model_type", model_type, "is known neither here nor to the installed transformers",
            "check its spelling, upgrade transformers, or trace a module of your own",
        )  # fmt: skip
    try:
        config = known[model_type](**raw)
        named = [getattr(transformers, n) for n in raw.get("architectures") or [] if hasattr(transformers, n)]
        with torch.device("meta"):
            built = named[0](config) if named else _automatic(config).from_config(config)
    except Exception as error:  # the config's own checks raise anything
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidInput(
            "config",
            model_type,
            f"is refused by transformers ({reason[-1].strip()[:200]})",
            "correct the field it names",
        ) from error
    assert isinstance(built, nn.Module)
    return built


def _automatic(config: Any) -> Any:
    """The class of models to build where a config names no architecture: causal language models where there is one."""
    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return transformers.AutoModelForCausalLM if causal else transformers.AutoModel


def model_from_config(raw: dict[str, Any], *, name: str) -> Model:
    """Its parameters as a `Model`: exact counts, a chain of ops a layer."""
    module = module_from_config(raw)
    survey = _Survey.of(module)
    config: Any = module.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    stack = _layers(module)
    prefix, length = stack if stack else ("", 0)
    blocks = [_block(survey, f"{prefix}.{i}.", text) for i in range(length)]
    before, after = survey.split(prefix, length)
    hidden = int(getattr(text, "hidden_size", 0) or 1)
    vocab_size = int(getattr(text, "vocab_size", 0) or 1)
    return Model(
        name=name, family=str(raw["model_type"]), hidden_size=hidden, vocab_size=vocab_size,
        embedding=_chain("embedding", "", before, survey, hidden, text, attention=False),
        blocks=tuple((block, 1) for block in blocks),
        head=_chain("head", "", after, survey, hidden, text, attention=False),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Survey:
    """Every persistent tensor once under its name: shape, trainable, whom it shares its storage with, its module."""

    shapes: dict[str, tuple[int, ...]]
    trainable: dict[str, bool]
    tied: dict[str, str]
    owners: dict[str, nn.Module]

    @classmethod
    def of(cls, module: nn.Module) -> _Survey:
        shapes: dict[str, tuple[int, ...]] = {}
        trainable: dict[str, bool] = {}
        tied: dict[str, str] = {}
        owners: dict[str, nn.Module] = {}
        first: dict[int, str] = {}
        kept = set(module.state_dict())
        for path, child in module.named_modules():
            for key, tensor in (*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)):
                name = f"{path}.{key}" if path else key
                if name not in kept or not tensor.dtype.is_floating_point or not tensor.numel():
                    continue
                if id(tensor) in first:
                    tied[name] = first[id(tensor)]
                first.setdefault(id(tensor), name)
                shapes[name] = tuple(tensor.shape) or (1,)
                trainable[name] = isinstance(tensor, nn.Parameter) and tensor.requires_grad
                owners[name] = child
        return cls(shapes, trainable, tied, owners)

    def below(self, prefix: str) -> list[str]:
        """Names below `prefix`."""
        return [n for n in self.shapes if n.startswith(prefix)]

    def split(self, prefix: str, length: int) -> tuple[list[str], list[str]]:
        """What stands outside the layers: before them, and after them."""
        inside = {n for i in range(length) for n in self.below(f"{prefix}.{i}.")}
        names = list(self.shapes)
        last = max((i for i, n in enumerate(names) if n in inside), default=len(names) - 1)
        outside = [(i, n) for i, n in enumerate(names) if n not in inside]
        return [n for i, n in outside if i < last], [n for i, n in outside if i >= last]


def _layers(module: nn.Module) -> tuple[str, int] | None:
    """The longest list of modules, the layers, and its length."""
    lists = [(path, len(child)) for path, child in module.named_modules() if isinstance(child, nn.ModuleList)]
    return max(lists, key=lambda item: item[1]) if lists else None


def _block(survey: _Survey, prefix: str, text: Any) -> Block:
    hidden = int(getattr(text, "hidden_size", 0) or 1)
    return _chain("decoder", prefix, survey.below(prefix), survey, hidden, text, attention=True)


def _chain(
    name: str, prefix: str, names: list[str], survey: _Survey, hidden: int, text: Any, *, attention: bool
) -> Block:
    """One op a module that holds parameters, one after another."""
    flow = Flow(name, re.sub(r"\{|\}", "", prefix), width=hidden)
    x = "input"
    for path, weights in _grouped(names, survey, prefix, text):
        label = path or f"{name}.own"
        kind, d_in, d_out = _kind(survey.owners[prefix + weights[0].name], weights, flow.values[x].width)
        if d_in != flow.values[x].width:  # it reads something else of the layer, of which nothing more is known
            x = flow.value(f"{label}.input", d_in, alias=x)
        x = flow.op(label, kind, (x,), (flow.value(label, d_out),), weights=weights)
    heads = getattr(text, "num_attention_heads", None)
    if attention and isinstance(heads, int) and heads > 0:
        core = _core(text, heads, hidden)
        q = flow.value("attention.q", core.num_heads * core.head_dim, alias=x)
        x = flow.attention("attention.core", (q,), core)
    return flow.done(x)


def _core(text: Any, heads: int, hidden: int) -> Attention:
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = int(getattr(text, "head_dim", None) or max(1, hidden // heads))
    return Attention(num_heads=heads, num_kv_heads=int(kv_heads), head_dim=head_dim, v_head_dim=head_dim)


def _grouped(names: list[str], survey: _Survey, prefix: str, text: Any) -> Iterator[tuple[str, tuple[Weight, ...]]]:
    """Weights by the module that owns them, in order."""
    groups: dict[str, list[Weight]] = {}
    for name in names:
        short = name.removeprefix(prefix)
        groups.setdefault(short.rpartition(".")[0], []).append(_weight(short, name, survey, text))
    for path, weights in groups.items():
        yield path, tuple(weights)


def _weight(short: str, name: str, survey: _Survey, text: Any) -> Weight:
    """A matrix multiplies unless an embedding owns it; a stack of matrices, one an expert, is read as experts."""
    shape, owner = survey.shapes[name], survey.owners[name]
    counts = (getattr(text, field, None) for field in ("num_experts", "num_local_experts", "n_routed_experts"))
    experts = next((int(n) for n in counts if n), 0)
    looked_up = isinstance(owner, nn.Embedding)
    stacked = len(shape) > 1 and shape[0] == experts and "experts" in type(owner).__name__.lower()
    return Weight(
        name=short, shape=shape[1:] if stacked else shape, num_experts=experts if stacked else 1, stacked=stacked,
        top_k=int(getattr(text, "num_experts_per_tok", 1) or 1) if stacked else 1,
        multiplies=len(shape) >= (3 if stacked else 2) and not looked_up, trainable=survey.trainable[name],
        tied_to=survey.tied.get(name),
    )  # fmt: skip


def _kind(owner: nn.Module, weights: tuple[Weight, ...], width: int) -> tuple[OpKind, int, int]:
    """What a module is, and the widths of what it reads and makes."""
    matrix = next((w for w in weights if w.multiplies), None)
    if isinstance(owner, nn.Embedding):
        return OpKind.EMBEDDING, width, owner.embedding_dim
    if matrix is None:
        norm = "norm" in type(owner).__name__.lower()
        own = weights[0].shape[-1] if norm else width
        return (OpKind.NORM if norm else OpKind.OTHER), own, own
    d_out = matrix.shape[0] * matrix.top_k
    d_in = math.prod(matrix.shape[1:]) * matrix.top_k
    if isinstance(owner, transformers.pytorch_utils.Conv1D):  # stored (in, out)
        d_in, d_out = d_out, d_in
    if isinstance(owner, nn.Conv1d | nn.Conv2d):
        return OpKind.CONV, d_in, d_out
    return OpKind.MATMUL, d_in, d_out
