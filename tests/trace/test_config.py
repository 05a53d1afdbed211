"""Model types that no family writes out are built by transformers and counted."""

import pytest

from loadmaster.describe.families import from_hf
from loadmaster.describe.model import Model
from loadmaster.errors import InvalidInput

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def counted(raw: dict[str, object]) -> tuple[Model, torch.nn.Module]:
    from loadmaster.trace.config import module_from_config

    return from_hf(raw), module_from_config(dict(raw))


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "stablelm", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 96},
        {"model_type": "olmoe", "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 96,
         "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2,
         "pad_token_id": 0},
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"], "hidden_size": 32,
         "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96},
        {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "hidden_size": 32, "vocab_size": 96,
         "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    ],
    ids=lambda raw: raw["model_type"],
)  # fmt: skip
def test_counts_are_those_of_the_module(raw: dict[str, object]) -> None:
    model, module = counted(raw)
    assert model.num_params == sum(p.numel() for p in module.parameters())
    assert model.num_trainable_params == model.num_params
    assert model.num_layers == raw["num_hidden_layers"]
    assert {n for n, _ in model.named_weights()} == {n for n, _ in module.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 96,
         "num_attention_heads": 4, "num_key_value_heads": 2},
        {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64},
        {"model_type": "mixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "vocab_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
         "num_experts_per_tok": 2},
    ],
    ids=lambda raw: raw["model_type"],
)  # fmt: skip
def test_a_counted_model_has_the_flops_of_the_one_written_out(raw: dict[str, object]) -> None:
    from loadmaster.laws.flops import block_flops
    from loadmaster.trace.config import model_from_config

    counted, written = model_from_config(dict(raw), name="counted"), from_hf(raw)
    for model in (counted, written):
        assert model.num_layers == 2
    forward = [sum(n * block_flops(b, 16).total for b, n in m.parts()) for m in (counted, written)]
    assert forward[0] == forward[1]
    assert counted.matmul_params == written.matmul_params
    assert counted.num_active_params == written.num_active_params


def test_experts_are_seen_as_such() -> None:
    model, _ = counted(
        {"model_type": "olmoe", "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 96,
         "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2,
         "pad_token_id": 0}
    )  # fmt: skip
    routed = 2 * 4 * 3 * 32 * 16
    assert model.num_params - model.num_active_params == routed // 2


def test_unknown_and_refused_configs() -> None:
    with pytest.raises(InvalidInput, match=r"config\.model_type = lama: is known neither here nor"):
        from_hf({"model_type": "lama"})
    with pytest.raises(InvalidInput, match="is refused by transformers"):
        from_hf({"model_type": "stablelm", "hidden_size": "wide"})
