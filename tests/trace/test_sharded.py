"""One rank of many on a fake process group: what it holds of parameters, state, gathered layers and activations."""

import pytest
import torch
import torch.distributed as dist

from loadmaster.describe.layout import Layout
from loadmaster.errors import InvalidInput
from loadmaster.trace.api import trace


def llama(layers=4):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=256, use_cache=False,
    )  # fmt: skip
    ids = torch.zeros(2, 16, dtype=torch.long)
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
TOTAL = 4 * LAYER + 2 * 256 * 64 + 64


def rank(text, **options):
    return trace(llama, layout=Layout.parse(text), **options)


@pytest.mark.parametrize("shards", [2, 8])
def test_fully_shard_divides_all_state(shards):
    step = rank(f"dp_shard={shards},zero=3")
    held = step.peak_in("optimizer 2").ledger
    assert held["parameters"] == held["gradients"] == held["optimizer/exp_avg"] == 4 * TOTAL // shards
    assert not dist.is_initialized()


def test_gathered_layers_come_and_go():
    """Two layers and the root are whole at once at most, never the model."""
    step = rank("dp_shard=64,zero=3")
    assert step.peak_in("zero_grad").ledger["buffers/all_gather"] == 0
    gathered = max(step.peak_in(phase).ledger["buffers/all_gather"] for phase in ("forward", "backward"))
    root = 4 * (2 * 256 * 64 + 64)
    assert root + 4 * LAYER <= gathered <= root + 3 * 4 * LAYER


def test_replicas_of_shards_hold_as_much_as_shards():
    alone, replicated = rank("dp_shard=4,zero=3"), rank("dp_replicate=3,dp_shard=4,zero=3")
    assert alone.peak_in("optimizer").ledger["parameters"] == replicated.peak_in("optimizer").ledger["parameters"]


def test_compute_copies_are_gathered_in_bf16():
    full, mixed = rank("dp_shard=4,zero=3"), rank("dp_shard=4,zero=3", precision="bf16-mixed")
    whole, half = (sum(t.bytes for t in s.storages if t.term == "buffers/all_gather") for s in (full, mixed))
    assert half * 2 == whole > 0


def test_tensor_parallel_splits_the_blocks():
    step = rank("tp=4")
    norms, outside = 4 * 2 * 64, 2 * 256 * 64 + 64
    assert step.peak_in("optimizer").ledger["parameters"] == 4 * ((4 * LAYER - norms) // 4 + norms + outside)
    assert "parameter by parameter" in step.notes[0]


@pytest.mark.parametrize(("schedule", "in_flight"), [("1f1b", (4, 3, 2, 1)), ("gpipe", (6, 6, 6, 6))])
def test_a_stage_holds_the_micro_batches_in_flight(schedule, in_flight):
    one = trace(llama, optimizer="sgd", steps=1, foreach=False)
    block = one.saved_bytes("model.layers.1")
    for stage in (1, 2):
        step = rank(f"pp=4,schedule={schedule}", stage=stage, micro_batches=6, optimizer="sgd", foreach=False, steps=1)
        held = step.peak_in("forward").ledger
        assert held["parameters"] == 4 * LAYER
        # its first block's input is the buffer received; the rotary tables are saved once a micro-batch
        stream, tables = 2 * 16 * 64 * 4, 2 * 16 * 8 * 4
        assert held["activations"] == in_flight[stage] * (block - stream + tables)
        assert held["buffers/communication"] == in_flight[stage] * stream


def test_stages_hold_every_parameter_once():
    steps = [rank("pp=3", stage=s, steps=1, optimizer="sgd", foreach=False) for s in range(3)]
    assert sum(s.peak_in("forward").ledger["parameters"] for s in steps) == 4 * TOTAL


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp_shard=4,zero=1", "zero = 1: is not traced"), ("dp_shard=4", "shards nothing at zero=0"),
        ("cp=2", "cp = 2: is not traced"), ("pp=2,schedule=zb_h1", "schedule = zb_h1"),
        ("pp=5", "has no layer of 4"),
    ],
)  # fmt: skip
def test_what_is_not_traced_is_refused(text, message):
    with pytest.raises(InvalidInput, match=message):
        rank(text)
    with pytest.raises(InvalidInput, match="no linear layer"):
        trace(torch.nn.Linear(4, 4), torch.zeros(2, 4), layout=Layout(tp=2))
