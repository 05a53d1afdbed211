"""Bytes of 8-bit state: the law against what the optimizer holds for real modules, to the byte."""

import pytest
import torch

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.layout import Layout
from loadmaster.describe.model import Model
from loadmaster.describe.stack import Stack
from loadmaster.describe.workload import Workload
from loadmaster.laws.memory import memory_terms
from loadmaster.laws.quantisation import state_bytes, state_elements, state_terms
from loadmaster.program.codebook import aligned_ranges
from loadmaster.runtime import optim

transformers = pytest.importorskip("transformers")

CONFIGS = {
    "gpt2": {"model_type": "gpt2", "n_embd": 96, "n_layer": 2, "n_head": 4, "vocab_size": 500, "n_positions": 64},
    "llama": {
        "model_type": "llama", "hidden_size": 72, "intermediate_size": 200, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "tie_word_embeddings": False,
    },
    "mixtral": {
        "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip


def build(config: dict) -> torch.nn.Module:
    options = {k: v for k, v in config.items() if k != "model_type"}
    return transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(config["model_type"], **options), dtype=torch.float32
    )


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("bits", [8, 32])
def test_predicted_state_is_held(config, bits) -> None:
    module = build(config)
    optimizer = optim.AdamW(module, state_bits=bits)
    optimizer.initialise()
    held = optimizer.state_bytes()
    predicted = state_bytes(state_elements(Model.from_hf(config)), moments=2, bits=bits)
    assert held["exp_avg"] + held["exp_avg_sq"] == predicted.moments
    assert held.get("scales", 0) == predicted.scales


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_ranks_terms_are_held(ranks) -> None:
    module = build(CONFIGS["llama"])
    embeddings = optim.embedding_parameters(module)
    for rank in range(ranks):
        shards, ranges = {}, []
        for name, p in module.named_parameters():
            start, stop = aligned_ranges(p.numel(), ranks)[rank]
            part = torch.nn.Parameter(p.detach().flatten()[start:stop].clone())
            shards[part] = optim.ParameterShard(
                name=name, full_shape=tuple(p.shape), start=start, stop=stop, is_embedding=p in embeddings
            )
            ranges.append((p.numel(), p in embeddings, start, stop))
        optimizer = optim.AdamW(shards, state_bits=8, shards=shards)
        optimizer.initialise()
        held = {f"optimizer/{k}": v for k, v in optimizer.state_bytes().items()}
        assert held == {k: v for k, v in state_terms(ranges).items() if v}


def test_the_memory_law_counts_the_same() -> None:
    """Tensors of whole blocks, where one rounding up for all of them is exact."""
    config = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "tie_word_embeddings": False,
    }  # fmt: skip
    terms = memory_terms(
        Model.from_hf(config), Cluster.parse("1xh100-sxm"), Workload(global_batch_size=1, seq_len=16),
        Layout(optimizer_bits=8), Stack.named("loadmaster"), stage=0,
    )  # fmt: skip
    predicted = state_bytes(state_elements(Model.from_hf(config)), moments=2)
    assert terms["optimizer/exp_avg"] + terms["optimizer/exp_avg_sq"] == predicted.moments
    assert terms["optimizer/scales"] == predicted.scales
