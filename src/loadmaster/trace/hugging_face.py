"""A Hugging Face config as a module on ghosts, with the inputs of a training step: no weights are fetched or drawn."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from loadmaster.errors import InvalidInput, MissingDependency

__all__ = ["factory_from_config"]

_OURS = ("model_type", "architectures", "torch_dtype", "dtype", "_name_or_path", "transformers_version")


def factory_from_config(raw: Mapping[str, Any], *, batch: int, seq_len: int) -> Callable[[], tuple[nn.Module, Any]]:
    """A function that builds the module with SDPA attention and its inputs; call it inside a trace.

    Raises:
        InvalidInput: transformers cannot build the config; MissingDependency: it is not installed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a config is all there is to fetch, and it is here
    try:
        import transformers
    except ImportError:
        raise MissingDependency("tracing a config", "transformers", "runtime") from None
    transformers.logging.set_verbosity_error()

    def build() -> tuple[nn.Module, Any]:
        module = _build(transformers, raw)
        return module, _inputs(module, batch, seq_len)

    return build


def _build(transformers: Any, raw: Mapping[str, Any]) -> nn.Module:
    model_type = raw.get("model_type")
    fields = {k: v for k, v in raw.items() if k not in _OURS}
    try:
        config = transformers.AutoConfig.for_model(model_type, **fields)
        config.use_cache = False
        if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
        named = [n for n in raw.get("architectures") or [] if hasattr(transformers, str(n))]
        make: Any = transformers.AutoModelForCausalLM.from_config
        if named:
            make = getattr(transformers, named[0])._from_config
        try:
            module = make(config, attn_implementation="sdpa")
        except Exception as error:  # some models have their own attention only
            if "scaled_dot_product_attention" not in str(error):
                raise
            module = make(config, attn_implementation="eager")
    except Exception as error:  # whatever a model class makes of a field it does not like
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidInput(
            "model.config", model_type, f"transformers does not build it ({said})",
            "check the config, or give package.module:factory",
        ) from error  # fmt: skip
    assert isinstance(module, nn.Module)
    return module


def _inputs(module: Any, batch: int, seq_len: int) -> dict[str, torch.Tensor]:
    """What the module's forward takes, by its main input; labels where it has a loss of its own."""
    config = module.config
    given: dict[str, torch.Tensor] = {}
    match module.main_input_name:
        case "pixel_values":
            given["pixel_values"] = torch.empty(batch, config.num_channels, config.image_size, config.image_size)
            labels = torch.zeros(batch, dtype=torch.long)
        case "input_features":
            given["input_features"] = torch.empty(batch, config.num_mel_bins, 2 * config.max_source_positions)
            labels = torch.zeros(batch, seq_len, dtype=torch.long)
        case _:
            given["input_ids"] = torch.zeros(batch, seq_len, dtype=torch.long)
            labels = given["input_ids"]
    if type(module).__name__.endswith(("LMHeadModel", "ForCausalLM", "ForConditionalGeneration", "ForMaskedLM")) or (
        type(module).__name__.endswith("ForImageClassification")
    ):
        given["labels"] = labels
    return given
