"""Recomputing more never keeps more: none, selective, full, measured on real tensors."""

import pytest

torch = pytest.importorskip("torch")

from loadmaster.describe.layout import Layout  # noqa: E402
from loadmaster.runtime.peak import PeakMeter  # noqa: E402
from loadmaster.runtime.recompute import recompute_blocks  # noqa: E402


def rise(recompute: str) -> int:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=176, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, use_cache=False,
    )  # fmt: skip
    module = LlamaForCausalLM(config)
    recompute_blocks(list(module.model.layers), Layout(recompute=recompute))
    ids = torch.arange(256).view(4, 64) % 64
    with PeakMeter(torch.device("cpu")) as meter:
        module(input_ids=ids, labels=ids).loss.backward()
    return meter.rise


def test_full_keeps_less_than_selective_and_selective_less_than_none() -> None:
    none, selective, full = (rise(mode) for mode in ("none", "selective", "full"))
    assert full < selective < none
