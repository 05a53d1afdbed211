"""Forward FLOPs of every family: the law's equal those PyTorch counts while the module runs."""

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from loadmaster.describe.families import FAMILIES, from_hf  # noqa: E402
from loadmaster.laws.flops import block_flops  # noqa: E402

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
BATCH, TOKENS = 2, 12
TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96,
    "pad_token_id": 0,
}  # fmt: skip
GROUPED = TINY | {"num_key_value_heads": 2}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64}
EXPERTS = GROUPED | {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 16}
DEEPSEEK = TINY | {
    "moe_intermediate_size": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "q_lora_rank": 12,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": GROUPED, "mistral": GROUPED | {"head_dim": 12}, "qwen2": GROUPED, "qwen3": GROUPED | {"head_dim": 12},
    "smollm3": GROUPED, "granite": GROUPED, "olmo2": GROUPED, "phi3": GROUPED,
    "gemma": GROUPED | {"head_dim": 12}, "gemma2": GROUPED | {"head_dim": 12},
    "gemma3_text": GROUPED | {"head_dim": 12},
    "gpt2": GPT, "gpt_neox": TINY, "gptj": GPT | {"rotary_dim": 4},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96},
    "opt": TINY | {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 96},
    "falcon": TINY | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "mixtral": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}, "qwen2_moe": EXPERTS,
    "qwen3_moe": EXPERTS, "deepseek_v2": DEEPSEEK, "deepseek_v3": DEEPSEEK, "bert": TINY,
    "t5": {"d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 96,
           "feed_forward_proj": "gated-gelu"},
    "vit": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 32, "patch_size": 8, "num_labels": 7},
    "whisper": {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
                "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 96,
                "max_source_positions": 10, "max_target_positions": 16, "pad_token_id": 0},
}  # fmt: skip


def inputs(family: str, raw: dict[str, Any]) -> dict[str, Any]:
    ids = torch.randint(1, 90, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
    match family:
        case "vit":
            return {"pixel_values": torch.zeros(BATCH, 3, raw["image_size"], raw["image_size"])}
        case "whisper":
            return {"input_features": torch.zeros(BATCH, 80, 2 * raw["max_source_positions"]), "decoder_input_ids": ids}
        case "t5":
            return {"input_ids": ids, "decoder_input_ids": ids}
        case _:
            return {"input_ids": ids}


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_forward_flops_are_those_pytorch_counts(family: str) -> None:
    raw = {"model_type": family} | CONFIGS[family]
    config = transformers.CONFIG_MAPPING[family](**raw)
    config._attn_implementation = config._experts_implementation = "eager"  # what the counter can see
    if family != "vit":
        config.use_cache = False
    module = getattr(transformers, FAMILIES[family][2])(config).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(**inputs(family, raw))
    model = from_hf(raw)
    law = BATCH * sum(n * block_flops(b, model.seq_len_of(b, TOKENS)).total for b, n in model.parts())
    assert law == counter.get_total_flops()
