"""Hugging Face configs to exact op tables, one file a family; `from_hf` finds the right one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

from loadmaster.describe.families.fields import Fields
from loadmaster.describe.model import Model
from loadmaster.errors import InvalidInput, MissingDependency

__all__ = ["FAMILIES", "catalogue", "from_hf", "read_config"]

CATALOGUE = Path(__file__).parents[1] / "catalog" / "models"

# model_type -> (module below this package, function, architectures it builds: with a head, bare body)
FAMILIES = {
    "llama": ("llama", "llama_like", "LlamaForCausalLM", "LlamaModel"),
    "mistral": ("llama", "llama_like", "MistralForCausalLM", "MistralModel"),
    "qwen2": ("llama", "llama_like", "Qwen2ForCausalLM", "Qwen2Model"),
    "qwen3": ("llama", "llama_like", "Qwen3ForCausalLM", "Qwen3Model"),
    "smollm3": ("llama", "llama_like", "SmolLM3ForCausalLM", "SmolLM3Model"),
    "granite": ("llama", "llama_like", "GraniteForCausalLM", "GraniteModel"),
    "olmo2": ("llama", "llama_like", "Olmo2ForCausalLM", "Olmo2Model"),
    "phi3": ("llama", "llama_like", "Phi3ForCausalLM", "Phi3Model"),
    "gemma": ("llama", "llama_like", "GemmaForCausalLM", "GemmaModel"),
    "gemma2": ("llama", "llama_like", "Gemma2ForCausalLM", "Gemma2Model"),
    "gemma3_text": ("llama", "llama_like", "Gemma3ForCausalLM", "Gemma3TextModel"),
    "gemma3": ("gemma3", "gemma3", "Gemma3ForConditionalGeneration", "Gemma3Model"),
    "gpt2": ("gpt2", "gpt2", "GPT2LMHeadModel", "GPT2Model"),
    "gpt_neox": ("gpt_neox", "gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXModel"),
    "gptj": ("gptj", "gptj", "GPTJForCausalLM", "GPTJModel"),
    "bloom": ("bloom", "bloom", "BloomForCausalLM", "BloomModel"),
    "opt": ("opt", "opt", "OPTForCausalLM", "OPTModel"),
    "mpt": ("mpt", "mpt", "MptForCausalLM", "MptModel"),
    "falcon": ("falcon", "falcon", "FalconForCausalLM", "FalconModel"),
    "mixtral": ("moe", "mixtral", "MixtralForCausalLM", "MixtralModel"),
    "qwen2_moe": ("moe", "qwen_moe", "Qwen2MoeForCausalLM", "Qwen2MoeModel"),
    "qwen3_moe": ("moe", "qwen_moe", "Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    "deepseek_v2": ("deepseek", "deepseek", "DeepseekV2ForCausalLM", "DeepseekV2Model"),
    "deepseek_v3": ("deepseek", "deepseek", "DeepseekV3ForCausalLM", "DeepseekV3Model"),
    "bert": ("bert", "bert", "BertForMaskedLM", "BertModel"),
    "t5": ("t5", "t5", "T5ForConditionalGeneration", "T5Model"),
    "vit": ("vit", "vit", "ViTForImageClassification", "ViTModel"),
    "whisper": ("whisper", "whisper", "WhisperForConditionalGeneration", "WhisperModel"),
}


def from_hf(source: str | PathLike[str] | Mapping[str, Any]) -> Model:
    """Model from a catalogue name, a path to config.json or its folder, a dict, or ``package.module:function``.

    Raises:
        InvalidInput: an unknown name, no JSON object, a missing or absurd field, an unknown model type.
        MissingDependency: the model type is not written out here and the runtime is not installed.

    >>> from_hf("gpt2").num_params
    124439808
    """
    if isinstance(source, str) and ":" in source and not Path(source).exists():
        return _from_factory(source)
    name, raw = read_config(source)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise InvalidInput(
            "config.model_type", model_type, "must name the architecture", 'add e.g. "model_type": "llama"'
        )
    if model_type in FAMILIES:
        module, function, headed, bare = FAMILIES[model_type]
        architecture = _architecture(raw, model_type, headed)
        if architecture in (headed, bare):
            family = import_module(f"loadmaster.describe.families.{module}")
            fields = Fields(raw, aliases=getattr(family, "ALIASES", None))
            fields.optional_count("max_position_embeddings", minimum=0)  # not every family counts with it; all state it
            built = getattr(family, function)(
                fields, name=name, model_type=model_type, with_head=architecture == headed
            )
            assert isinstance(built, Model)
            return built
    return _from_transformers(name, model_type, raw)


# names under which published configs spell an architecture that transformers calls otherwise
_SPELLINGS: dict[str, str] = {
    "T5WithLMHeadModel": "T5ForConditionalGeneration",
}


ENCODERS = ("bert", "vit", "t5", "whisper")


def _architecture(raw: Mapping[str, Any], model_type: str, default: str) -> str:
    named = raw.get("architectures") or [default]
    if not isinstance(named, list) or not all(isinstance(n, str) for n in named):
        raise InvalidInput("config.architectures", named, "must be a list of names", f'write e.g. ["{default}"]')
    spelled = [_SPELLINGS.get(str(n), str(n)) for n in named]
    if default in spelled or (spelled[0].endswith(("ForCausalLM", "LMHeadModel")) and model_type not in ENCODERS):
        return default  # a language model under a name of the config's own code
    return spelled[0]


def _from_factory(target: str) -> Model:
    """A model that no config describes: what ``package.module:function`` returns is traced."""
    if find_spec("torch") is None:
        raise MissingDependency("tracing a module", "torch", "runtime")
    tracing = import_module("loadmaster.trace.module_to_model")
    built = tracing.model_from_module(tracing.load_factory(target), name=target)
    assert isinstance(built, Model)
    return built


def _from_transformers(name: str, model_type: str, raw: Mapping[str, Any]) -> Model:
    """A model that no file here writes out: built by transformers without weights, and counted."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        if model_type in FAMILIES:
            known = " and ".join(FAMILIES[model_type][2:])
            raise InvalidInput(
                "config.architectures", raw.get("architectures"), f"of {model_type} only {known} are written out here",
                "name one of them, or install the runtime (pip install 'loadmaster[runtime]') to have it counted",
            )  # fmt: skip
        raise InvalidInput(
            "config.model_type", model_type, f"is none of those written out here ({', '.join(FAMILIES)})",
            "use one of them, or install the runtime (pip install 'loadmaster[runtime]') to have it built and counted",
        )  # fmt: skip
    built = import_module("loadmaster.trace.config").model_from_config(dict(raw), name=name)
    assert isinstance(built, Model)
    return built


def catalogue() -> dict[str, Path]:
    """Every model known by name, ``owner/model``, and its file."""
    return {p.stem.replace("--", "/"): p for p in sorted(CATALOGUE.glob("*.json"))}


def read_config(source: str | PathLike[str] | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of a model and its config as a dict."""
    if isinstance(source, Mapping):
        return str(source.get("_name_or_path") or source.get("model_type") or "model"), dict(source)
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json" or path.is_file():
        if not path.is_file():
            raise InvalidInput("model", str(source), "no such config file", "give a path to a Hugging Face config.json")
        return str(source), _load(path)
    return _by_name(str(source))


def _load(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput("model", str(path), f"is no JSON ({error})", "give a Hugging Face config.json") from None
    if not isinstance(raw, dict):
        raise InvalidInput("model", str(path), "holds no JSON object", "give a Hugging Face config.json")
    return raw


def _by_name(name: str) -> tuple[str, dict[str, Any]]:
    """A catalogue model by ``owner/model``, by ``model``, or by a part that only one has, in any case."""
    known = catalogue()
    if name in known:
        return name, _load(known[name])
    wanted = _plain(name)
    for match in (
        [k for k in known if _plain(k) == wanted],
        [k for k in known if _plain(k.split("/")[-1]) == wanted],
        [k for k in known if _short(k) == _short(name)],
        [k for k in known if _short(k).startswith(_short(name))],
    ):
        if len(match) == 1:
            return match[0], _load(known[match[0]])
    raise InvalidInput("model", name, "is no model known by name and no config file", _suggest(wanted, list(known)))


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def _short(name: str) -> str:
    """``meta-llama/Meta-Llama-3-8B`` and ``llama-3-8b`` alike."""
    return _plain(name.split("/")[-1]).removeprefix("meta-").removesuffix("-hf").replace(".", "").replace("-", "")


def _suggest(wanted: str, known: list[str]) -> str:
    from difflib import get_close_matches

    spellings = {spelled: k for k in known for spelled in (_plain(k), _plain(k.split("/")[-1]), _short(k))}
    close = get_close_matches(_short(wanted), list(spellings), n=4, cutoff=0.5)
    close += get_close_matches(wanted, list(spellings), n=4, cutoff=0.5)
    names = list(dict.fromkeys(spellings[c] for c in close))[:3]
    hint = f"did you mean {', '.join(names)}? " if names else ""
    return f"{hint}loadmaster catalog lists the names; a path to a config.json does as well"
