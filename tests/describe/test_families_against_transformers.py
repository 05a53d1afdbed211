"""Names and shapes of every weight equal those of the module that transformers builds, for odd configs too."""

import json
import re
from collections import Counter
from typing import Any

import pytest

from loadmaster.describe.families import FAMILIES, catalogue, from_hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def built(raw: dict[str, Any]) -> tuple[Any, set[str]]:
    """The module on the meta device and the names that share another's storage."""
    headed = FAMILIES[raw["model_type"]][2]
    architecture = (raw.get("architectures") or [headed])[0].replace("MPTFor", "MptFor")
    config_class = transformers.CONFIG_MAPPING[raw["model_type"]]
    with torch.device("meta"):
        module = getattr(transformers, architecture)(config_class(**raw))
    unique = dict(module.named_parameters())
    every = dict(module.named_parameters(remove_duplicate=False))
    return module, set(every) - set(unique)


def agree(raw: dict[str, Any]) -> None:
    module, shared = built(raw)
    model = from_hf(raw)
    parameters = {n: tuple(p.shape) for n, p in module.named_parameters(remove_duplicate=False)}
    state = set(module.state_dict())
    persistent = {n: tuple(b.shape) for n, b in module.named_buffers() if n in state}
    frozen = {n for n, p in module.named_parameters() if not p.requires_grad} | set(persistent)
    ours = {}
    tied = set()
    for name, weight in model.named_weights():
        ours[name] = (weight.num_experts, *weight.shape) if weight.stacked else weight.shape
        if weight.tied_to:
            tied.add(name)
            assert weight.tied_to in ours or weight.tied_to in dict(model.named_weights())
    assert ours == {n: s for n, s in (parameters | persistent).items() if n in ours or n not in shared}
    assert {n for n in shared if n in ours} == tied
    assert {n for n, w in model.named_weights() if not w.trainable} == frozen
    total = sum(p.numel() for p in module.parameters()) + sum(
        b.numel() for n, b in module.named_buffers() if n in persistent
    )
    assert model.num_params == total


def shortened(raw: dict[str, Any]) -> dict[str, Any]:
    """Four layers stand for all: building a hundred on the meta device takes seconds."""
    counts = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
    short = {k: min(raw[k], 4) for k in counts if k in raw}
    nested = {k: shortened(raw[k]) for k in ("text_config", "vision_config") if k in raw}
    return raw | short | nested


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_catalogue(name: str) -> None:
    raw = json.loads(catalogue()[name].read_text())
    agree(shortened(raw))


TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 96}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64}
MOE = TINY | {"num_experts_per_tok": 2, "num_key_value_heads": 2}
DEEPSEEK = TINY | {
    "moe_intermediate_size": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
WHISPER = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 8, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "vocab_size": 96,
    "max_source_positions": 20, "max_target_positions": 12, "pad_token_id": 0,
}  # fmt: skip
SLIDING = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
ODD: dict[str, list[dict[str, Any]]] = {
    "llama": [TINY, TINY | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "head_dim": 20},
              TINY | {"tie_word_embeddings": True, "architectures": ["LlamaModel"]}],
    "mistral": [TINY | {"num_key_value_heads": 2}, TINY | {"num_key_value_heads": 4, "head_dim": 16,
                                                          "sliding_window": None, "tie_word_embeddings": True}],
    "qwen2": [TINY | {"num_key_value_heads": 2, "use_sliding_window": True, "max_window_layers": 2},
              TINY | {"num_key_value_heads": 4, "tie_word_embeddings": True}],
    "qwen3": [TINY | {"num_key_value_heads": 2, "attention_bias": True},
              TINY | {"num_key_value_heads": 1, "head_dim": 24, "tie_word_embeddings": True}],
    "smollm3": [TINY | {"pad_token_id": 0},
                TINY | {"pad_token_id": 0, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1,
                              "tie_word_embeddings": False}],
    "granite": [TINY, TINY | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}],
    "olmo2": [TINY, TINY | {"attention_bias": True, "num_key_value_heads": 2, "tie_word_embeddings": True}],
    "phi3": [TINY | {"pad_token_id": 0}, TINY | {"num_key_value_heads": 2, "pad_token_id": 0,
                                                "tie_word_embeddings": True, "resid_pdrop": 0.1}],
    "gemma": [TINY | {"num_key_value_heads": 1, "head_dim": 12}, TINY | {"num_key_value_heads": 4}],
    "gemma2": [TINY, TINY | {"attention_bias": True, "num_key_value_heads": 2, "head_dim": 16, "layer_types": SLIDING,
                             "attn_logit_softcapping": None, "tie_word_embeddings": False}],
    "gemma3_text": [TINY, TINY | {"attention_bias": True, "num_key_value_heads": 2, "head_dim": 16,
                                  "sliding_window_pattern": 2}],
    "gemma3": [{"text_config": TINY, "vision_config": VIT | {"image_size": 32, "patch_size": 8}},
               {"text_config": TINY | {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True},
                "vision_config": VIT | {"image_size": 32, "patch_size": 8, "vision_use_head": False},
                "mm_tokens_per_image": 4, "tie_word_embeddings": False},
               {"text_config": TINY, "vision_config": VIT, "architectures": ["Gemma3Model"]}],
    "gpt2": [GPT, GPT | {"n_inner": 40, "tie_word_embeddings": False}, GPT | {"architectures": ["GPT2Model"]}],
    "gpt_neox": [TINY, TINY | {"attention_bias": False, "use_parallel_residual": False, "tie_word_embeddings": True}],
    "gptj": [GPT | {"rotary_dim": 4}, GPT | {"rotary_dim": 4, "n_inner": 40, "tie_word_embeddings": True}],
    "bloom": [{"n_embed": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96},
              {"hidden_size": 32, "n_layer": 2, "num_attention_heads": 4, "vocab_size": 96,
               "tie_word_embeddings": False, "apply_residual_connection_post_layernorm": True}],
    "opt": [TINY | {"ffn_dim": 48}, TINY | {"ffn_dim": 40, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
            TINY | {"ffn_dim": 40, "enable_bias": False, "layer_norm_elementwise_affine": False},
            TINY | {"ffn_dim": 40, "_remove_final_layer_norm": True, "tie_word_embeddings": False}],
    "mpt": [{"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 96, "expansion_ratio": 2, "no_bias": False},
            {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 96, "attn_config": {"alibi": False}}],
    "falcon": [TINY, TINY | {"multi_query": False, "bias": True}, TINY | {"parallel_attn": False, "alibi": True},
               TINY | {"new_decoder_architecture": True, "num_kv_heads": 2},
               TINY | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
                       "bias": True, "ffn_hidden_size": 40, "tie_word_embeddings": False}],
    "mixtral": [MOE, MOE | {"num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 16,
                            "tie_word_embeddings": True}],
    "qwen2_moe": [MOE | {"num_experts": 4, "moe_intermediate_size": 16},
                  MOE | {"num_experts": 4, "moe_intermediate_size": 16, "mlp_only_layers": [1], "qkv_bias": False,
                         "decoder_sparse_step": 2, "shared_expert_intermediate_size": 24}],
    "qwen3_moe": [MOE | {"num_experts": 4, "moe_intermediate_size": 16},
                  MOE | {"num_experts": 4, "moe_intermediate_size": 16, "mlp_only_layers": [3], "head_dim": 16,
                         "decoder_sparse_step": 2, "attention_bias": True}],
    "deepseek_v2": [DEEPSEEK | {"q_lora_rank": None, "first_k_dense_replace": 1},
                    DEEPSEEK | {"q_lora_rank": 12, "attention_bias": True, "n_shared_experts": 3, "mlp_bias": True}],
    "deepseek_v3": [DEEPSEEK | {"q_lora_rank": 12}, DEEPSEEK | {"q_lora_rank": None, "first_k_dense_replace": 0,
                                                                "attention_bias": True, "n_shared_experts": 2},
                    DEEPSEEK | {"first_k_dense_replace": 9}],
    "bert": [TINY, TINY | {"type_vocab_size": 3, "tie_word_embeddings": False},
             TINY | {"architectures": ["BertModel"]}],
    "t5": [T5, T5 | {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 3}, T5 | {"architectures": ["T5Model"]}],
    "vit": [VIT, VIT | {"qkv_bias": False, "image_size": [32, 48], "patch_size": 8, "num_labels": 7},
            VIT | {"architectures": ["ViTModel"], "pooler_output_size": 20},
            VIT | {"id2label": {"0": "a", "1": "b", "2": "c"}}],
    "whisper": [WHISPER, WHISPER | {"architectures": ["WhisperModel"], "num_mel_bins": 16}],
}  # fmt: skip


@pytest.mark.parametrize(
    "raw", [{"model_type": t} | raw for t, raws in ODD.items() for raw in raws],
    ids=[f"{t}-{i}" for t, raws in ODD.items() for i in range(len(raws))],
)  # fmt: skip
def test_odd_configs(raw: dict[str, Any]) -> None:
    agree(raw)


def test_every_family_has_odd_configs() -> None:
    assert set(ODD) == set(FAMILIES)


def test_t5_version_1_1_keeps_the_head_of_its_checkpoints() -> None:
    """google/flan-t5-small: 76,961,152 parameters in the checkpoint, its own head among them."""
    model = from_hf(
        {"model_type": "t5", "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_heads": 6,
         "vocab_size": 32128, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    )  # fmt: skip
    assert model.num_params == 76961152


def test_layers_keep_their_indices() -> None:
    names = Counter(name for name, _ in from_hf("google/gemma-2-2b").named_weights())
    assert max(names.values()) == 1
    assert {int(i) for n in names for i in re.findall(r"layers\.(\d+)\.", n)} == set(range(26))
