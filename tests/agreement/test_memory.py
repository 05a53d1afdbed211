"""Saved activations of a block: the memory law equals the trace of transformers' own module, to the byte.

The trace runs the modules as our runtime does (eager, SDPA, torch.autocast for 16-bit compute on wider weights) and
sums what autograd holds at the end of the forward and a middle block saved first. Dropout is off: its masks differ by
device.
"""

import pytest

from loadmaster.describe.families import from_hf
from loadmaster.describe.precision import Precision
from loadmaster.describe.stack import Stack
from loadmaster.laws.activations import input_polynomial, saved_bytes
from loadmaster.laws.polynomial import Shape
from loadmaster.trace.api import trace
from loadmaster.trace.hugging_face import factory_from_config

STACK = Stack.named("loadmaster")
SMALL = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
BERT = {
    "architectures": ["BertForMaskedLM"], "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 80, "vocab_size": 96, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
FAMILIES = {
    "bert": BERT,
    "llama": SMALL,
    "mistral": SMALL | {"sliding_window": None},
    "qwen2": SMALL,  # biases on q, k and v
    "qwen3": SMALL | {"head_dim": 16},  # norms of q and k
    "smollm3": SMALL,
    "granite": SMALL,
    "olmo2": SMALL,  # norms after the branches
    "phi3": SMALL | {"sliding_window": None},  # fused projections
    "gemma": SMALL | {"head_dim": 16},  # 1 + weight; gelu
    "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 96, "n_positions": 64,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {k: v for k, v in SMALL.items() if k != "num_key_value_heads"},
    "opt": {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 80, "vocab_size": 96,
            "max_position_embeddings": 64, "word_embed_proj_dim": 48, "dropout": 0.0},
}  # fmt: skip
PRECISIONS = {"fp32": "fp32", "bf16": "bf16", "bf16-mixed": "bf16-mixed"}


def both(model_type, fields, *, precision="fp32", batch=2, seq_len=16, recompute="none"):
    """Bytes a middle block keeps, by the law and by the trace."""
    raw = {"model_type": model_type, **fields}
    model = from_hf(raw)
    block, repeat = model.blocks[0]
    assert repeat == 3
    values = Precision.named(PRECISIONS[precision])
    step = trace(
        factory_from_config(raw, batch=batch, seq_len=seq_len), precision=precision, recompute=recompute,
        optimizer="sgd", foreach=False, steps=1,
    )  # fmt: skip
    traced = step.saved_bytes(block.prefix.format(1).rstrip("."))
    if recompute == "full":
        return int(input_polynomial(block, values, STACK)(Shape(batch=batch, seq_len=seq_len))), traced
    return sum(int(n) for n in saved_bytes(block, STACK, values, batch, seq_len).values()), traced


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_law_is_trace(model_type, precision):
    law, traced = both(model_type, FAMILIES[model_type], precision=precision)
    assert law == traced


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {"batch": 1, "seq_len": 1}),
        ({}, {"batch": 3, "seq_len": 40}),
        ({}, {"batch": 5, "seq_len": 7, "precision": "bf16"}),
        ({"num_key_value_heads": 4}, {}),  # as many as heads
        ({"num_key_value_heads": 1}, {"precision": "bf16-mixed"}),  # one for all
        ({"num_attention_heads": 8, "head_dim": 16}, {}),  # heads wider than the stream
        ({"tie_word_embeddings": True}, {}),
        ({"attention_bias": True, "mlp_bias": True}, {"precision": "bf16-mixed"}),
        ({"intermediate_size": 47}, {"precision": "bf16", "seq_len": 9}),
    ],
)  # fmt: skip
def test_law_is_trace_over_a_grid(fields, options):
    law, traced = both("llama", SMALL | fields, **options)
    assert law == traced


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "olmo2"])
def test_a_recomputed_block_keeps_its_input(model_type, precision):
    law, traced = both(model_type, FAMILIES[model_type], precision=precision, recompute="full")
    assert law == traced == 2 * 16 * 48 * (2 if precision == "bf16" else 4)
