"""A traced module as a `Model`: counts, FLOPs and saved bytes, and that it can be priced and planned."""

import pytest
import torch
from torch import nn

import loadmaster as lm
from loadmaster.describe.precision import Precision
from loadmaster.describe.stack import Stack
from loadmaster.errors import InvalidInput
from loadmaster.laws.activations import saved_bytes
from loadmaster.laws.flops import block_flops
from loadmaster.trace.api import trace
from loadmaster.trace.module_to_model import model_from_module

FP32, STACK = Precision.named("fp32"), Stack.named("loadmaster")


@pytest.mark.parametrize("name", ["resnet50", "unet", "t5", "vit", "shared", "lora", "whisper"])
def test_counts_and_saved_bytes(zoo, name):
    """Parameters are exact; what all parts keep is what the trace saw kept; repeats are found."""
    module, _ = zoo.ALL[name]()
    model = model_from_module(zoo.ALL[name])
    assert model.num_params == sum(p.numel() for p in module.parameters())
    assert model.num_trainable_params == sum(p.numel() for p in module.parameters() if p.requires_grad)
    step = trace(zoo.ALL[name], optimizer=None, steps=1)
    law = sum(
        n * sum(saved_bytes(block, STACK, FP32, zoo.BATCH, 1).values()) for block, n in model.parts()
    )  # fmt: skip
    assert law == step.saved_bytes()


def test_repeats_of_a_resnet(zoo):
    model = model_from_module(zoo.resnet50)
    assert [n for _, n in model.blocks] == [1, 2, 1, 3, 1, 5, 1, 2]  # the first of a stage changes the width
    assert model.num_layers == 16
    assert model.blocks[1][0].prefix == "stages.0.{}."


def test_flops_are_those_of_the_family(zoo):
    traced = model_from_module(zoo.llama)
    raw = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": zoo.VOCAB,
    }  # fmt: skip
    known = lm.Model.from_hf(raw)
    assert [n for _, n in traced.blocks] == [1, 2]  # the first layer saves the rotary tables for all
    block = traced.blocks[1][0]
    assert traced.num_layers == known.num_layers
    assert block_flops(block, zoo.SEQ).total == block_flops(known.blocks[0][0], zoo.SEQ).total
    assert block_flops(traced.head, zoo.SEQ).total == block_flops(known.head, zoo.SEQ).total
    law = saved_bytes(known.blocks[0][0], STACK, FP32, zoo.BATCH, zoo.SEQ)
    assert sum(saved_bytes(block, STACK, FP32, zoo.BATCH, zoo.SEQ).values()) == sum(law.values())


def test_bytes_grow_with_the_batch():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = model_from_module(Net(), torch.zeros(4, 8))
    block = model.blocks[1][0]  # the first block's input is the batch, which is no activation
    for batch in (1, 4, 9):
        step = trace(Net(), torch.zeros(batch, 8), optimizer=None, steps=1)
        assert sum(saved_bytes(block, STACK, FP32, batch, 1).values()) == step.saved_bytes("layers.1")


@pytest.mark.parametrize("name", ["resnet50", "unet", "t5"])
def test_a_traced_module_is_priced_and_planned(zoo, name):
    model = model_from_module(zoo.ALL[name])
    cluster = lm.Cluster.parse("8xa100-sxm-80gb") if "a100-sxm-80gb" in lm.describe.cluster.device_names() else (
        lm.Cluster.parse("8xh100-sxm")
    )  # fmt: skip
    workload = lm.Workload(global_batch_size=64, seq_len=model.fixed_seq_len)
    plain = lm.price(model, cluster, workload, lm.Layout(dp_replicate=8, micro_batch_size=8))
    sharded = lm.price(model, cluster, workload, lm.Layout(dp_shard=8, zero=3, micro_batch_size=8))
    assert sharded.memory["optimizer/exp_avg"] * 7 < plain.memory["optimizer/exp_avg"]
    assert plain.step_seconds > 0
    assert lm.plan(model, cluster, workload).plans
    with pytest.raises(InvalidInput, match="a traced module does not say"):
        lm.price(model, cluster, workload, lm.Layout(tp=2, dp_shard=4))


def test_price_takes_a_factory(tmp_path, monkeypatch):
    (tmp_path / "my_module.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), torch.zeros(2, 16)\n"
    )
    monkeypatch.chdir(tmp_path)
    model = lm.Model.from_hf("my_module:build")
    assert (model.num_params, model.num_layers, model.family) == (4 * 272, 4, "traced")
    with pytest.raises(InvalidInput, match="cannot be found"):
        lm.Model.from_hf("my_module:missing")
