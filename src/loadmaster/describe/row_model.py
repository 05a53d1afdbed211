"""The model of a measured row: its printed dimensions as a config of the nearest Hugging Face family."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from loadmaster.describe.families.megatron_gpt import MegatronGpt, megatron_gpt
from loadmaster.describe.model import Model
from loadmaster.describe.row_cells import Row, count
from loadmaster.errors import InvalidInput

__all__ = ["row_model"]

_DIMENSIONS = ("layers", "hidden", "heads", "vocab")
_MOST_LAYERS = 10_000
_LLAMA = ("llama", "mistral", "mixtral", "qwen", "yi-", "kempner", "internlm", "grok", "zb-llama")
_GPT = ("gpt", "vocabpar", "megatron", "phi")

# latent attention and experts of the two DeepSeeks, from their public configs; rows print the rest
_DEEPSEEK: dict[str, dict[str, Any]] = {
    "deepseek-v2": {"model_type": "deepseek_v2", "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
                    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "deepseek-v3": {"model_type": "deepseek_v3", "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
                    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_shared_experts": 1, "first_k_dense_replace": 3},
    "moonlight": {"model_type": "deepseek_v3", "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
                  "qk_rope_head_dim": 64, "v_head_dim": 128, "n_shared_experts": 2, "first_k_dense_replace": 1},
}  # fmt: skip


def row_model(row: Row) -> Model:
    """Model of a row.

    Raises:
        InvalidInput: a dimension is not printed, or no family has this shape.
    """
    for field in _DIMENSIONS:
        if not row.get(field):
            raise InvalidInput(f"row.{field}", "", "is not stated", "give the model's dimensions")
    if count(row, "layers") > _MOST_LAYERS:
        raise InvalidInput("row.layers", row["layers"], "is no model's number of layers", "check the cell")
    name = row["model"].lower().replace("-gptq", "")
    if "hybrid" in name or "mamba" in name or "nemotron" in name:
        raise InvalidInput("row.model", row["model"], "mixes state-space layers in", "no family describes it")
    if "printed dims give" in row.get("notes", ""):
        raise InvalidInput("row.model", row["model"], "has dimensions that contradict its printed size", "check them")
    if "golden" in row.get("notes", "") and _is_plain(row):
        return megatron_gpt(_megatron(row))
    return _build(row["model"], tuple(sorted(_config(row, name).items())))


def _is_plain(row: Row) -> bool:
    """A test of Megatron's GPT that no public family has: experts without a gate, rotary or grouped attention."""
    notes, experts = row.get("notes", ""), row.get("experts", "")
    if "swiglu" in notes or "multi-latent-attention" in notes or "moe-layer-freq" in notes:
        return False
    grouped = row.get("kv_heads") not in ("", row.get("heads"))
    return experts not in ("", "0") or grouped or "position-embedding-type=rope" in notes


def _megatron(row: Row) -> MegatronGpt:
    notes, hidden, heads = row.get("notes", ""), count(row, "hidden"), count(row, "heads")
    experts = count(row, "experts", 0, least=0)
    ffn = count(row, "ffn", 4 * hidden)
    if "position-embedding-type=none" in notes:
        raise InvalidInput("row.notes", "position-embedding-type=none", "is a model without positions", "give a config")
    return MegatronGpt(
        name=row["model"], layers=count(row, "layers"), hidden=hidden, heads=heads,
        kv_heads=count(row, "kv_heads", heads), ffn=count(row, "moe_ffn", ffn) if experts else ffn,
        vocab_size=count(row, "vocab"), positions=count(row, "seq_len"), tied=row.get("tied_emb") != "0",
        num_experts=experts, top_k=count(row, "topk", 1), bias="disable-bias-linear" not in notes,
        rotary="position-embedding-type=rope" in notes, dropout=0.1 if "TINY" in notes else 0.0,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _build(name: str, config: tuple[tuple[str, Any], ...]) -> Model:
    return Model.from_hf({**dict(config), "_name_or_path": name})


def _config(row: Row, name: str) -> dict[str, Any]:
    """A Hugging Face config."""
    notes = row.get("notes", "")
    for known, extra in _DEEPSEEK.items():
        if known in name or known.replace("-", "_") in name:
            return _deepseek(row, notes, extra)
    if "multi-latent-attention" in notes:
        return _deepseek(row, notes, _latent_from_notes(notes))
    if "bert" in name or "t5" in name or "vit" in name or "multimodal" in name:
        raise InvalidInput("row.model", row["model"], "is not a decoder of printed shape", "describe it by a config")
    if row.get("experts") not in ("", "0", None):
        return _mixture(row, notes, name)
    if "golden" in notes:
        return _llama(row) if "swiglu" in notes else _gpt(row, notes)
    if any(word in name for word in ("mpt",)):
        return _mpt(row)
    if any(word in name for word in _LLAMA) and "gpt" not in name:
        return _llama(row) if "qwen" not in name else _qwen(row, name)
    if any(word in name for word in _GPT):
        return _gpt(row, notes)
    raise InvalidInput("row.model", row["model"], "belongs to no family that rows describe", "give a config")


def _dims(row: Row) -> dict[str, Any]:
    heads = count(row, "heads")
    config: dict[str, Any] = {
        "hidden_size": count(row, "hidden"), "num_hidden_layers": count(row, "layers"),
        "num_attention_heads": heads, "num_key_value_heads": count(row, "kv_heads", heads),
        "vocab_size": count(row, "vocab"), "tie_word_embeddings": row.get("tied_emb") == "1",
        "max_position_embeddings": max(count(row, "seq_len", 2048), 2048),
    }  # fmt: skip
    if row.get("head_dim"):
        config["head_dim"] = count(row, "head_dim")
    return config


def _llama(row: Row) -> dict[str, Any]:
    return {"model_type": "llama", "intermediate_size": count(row, "ffn"), **_dims(row)}


def _qwen(row: Row, name: str) -> dict[str, Any]:
    kind = "qwen3" if "qwen3" in name else "qwen2"
    return {"model_type": kind, "intermediate_size": count(row, "ffn"), **_dims(row)}


def _gpt(row: Row, notes: str) -> dict[str, Any]:
    dims = _dims(row)
    rotary = "position-embedding-type=rope" in notes
    # Megatron's default, which its tests and BLOOM's pre-runs leave
    rate = 0.1 if "TINY" in notes or "bigscience" in row["model"] else 0.0
    if dims["num_key_value_heads"] != dims["num_attention_heads"] or rotary:
        raise InvalidInput("row.model", row["model"], "is a GPT with rotary or grouped attention", "give a config")
    return {
        "model_type": "gpt2", "n_embd": dims["hidden_size"], "n_layer": dims["num_hidden_layers"],
        "n_head": dims["num_attention_heads"], "n_inner": count(row, "ffn", 4 * dims["hidden_size"]),
        "vocab_size": dims["vocab_size"], "n_positions": count(row, "seq_len", 1024),
        "tie_word_embeddings": row.get("tied_emb") != "0", "resid_pdrop": rate, "attn_pdrop": rate, "embd_pdrop": rate,
    }  # fmt: skip


def _mpt(row: Row) -> dict[str, Any]:
    return {
        "model_type": "mpt", "d_model": count(row, "hidden"), "n_layers": count(row, "layers"),
        "n_heads": count(row, "heads"), "expansion_ratio": 4, "vocab_size": count(row, "vocab"),
        "max_seq_len": count(row, "seq_len"), "no_bias": True,
    }  # fmt: skip


def _mixture(row: Row, notes: str, name: str) -> dict[str, Any]:
    if "golden" in notes and "swiglu" not in notes:
        raise InvalidInput("row.model", row["model"], "has experts without a gate", "no family describes it")
    dims = _dims(row)
    experts, top_k = count(row, "experts"), count(row, "topk")
    if "qwen" in name:
        return {
            "model_type": "qwen3_moe", **dims, "intermediate_size": count(row, "ffn", 6144),
            "moe_intermediate_size": count(row, "moe_ffn"), "num_experts": experts, "num_experts_per_tok": top_k,
        }  # fmt: skip
    return {
        "model_type": "mixtral", **dims, "intermediate_size": count(row, "moe_ffn", count(row, "ffn")),
        "num_local_experts": experts, "num_experts_per_tok": top_k,
    }  # fmt: skip


def _deepseek(row: Row, notes: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    dims = _dims({**row, "kv_heads": row["heads"]})
    dims.pop("head_dim", None)
    config = {
        **dims, **extra, "intermediate_size": count(row, "ffn"), "moe_intermediate_size": count(row, "moe_ffn"),
        "n_routed_experts": count(row, "experts"), "num_experts_per_tok": count(row, "topk"),
        "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    dense = re.search(r"(\d+) dense layer", notes) or re.search(r"moe-layer-freq=\(\[0\]\*(\d+)", notes)
    if dense:
        config["first_k_dense_replace"] = int(dense[1])
    shared = re.search(r"shared expert (\d+)", notes)
    if shared:
        config["n_shared_experts"] = int(shared[1]) // int(config["moe_intermediate_size"])
    return config


def _latent_from_notes(notes: str) -> dict[str, Any]:
    found = dict(re.findall(r"([a-z-]+)=(\d+)", notes))
    moe = int(found.get("moe-shared-expert-intermediate-size", "0"))
    return {
        "model_type": "deepseek_v3", "q_lora_rank": int(found["q-lora-rank"]) if "q-lora-rank" in found else None,
        "kv_lora_rank": int(found.get("kv-lora-rank", "512")), "qk_nope_head_dim": int(found.get("qk-head-dim", "128")),
        "qk_rope_head_dim": int(found.get("qk-pos-emb-head-dim", "64")),
        "v_head_dim": int(found.get("v-head-dim", "128")), "n_shared_experts": 1 if moe else 0,
    }  # fmt: skip
