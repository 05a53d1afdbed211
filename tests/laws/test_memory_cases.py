"""Worked cases from public reports that the memory law has to give, and faults of other tools it must not have."""

import pytest

import loadmaster as lm
from loadmaster.describe.model import Block
from loadmaster.describe.op import Op, OpKind, Value, Weight
from loadmaster.laws.activations import input_polynomial, saved_bytes
from loadmaster.laws.frozen import state_per_weight
from loadmaster.laws.loss import loss_tensors
from loadmaster.laws.memory import memory_peak, memory_total
from loadmaster.laws.polynomial import Shape
from loadmaster.laws.run import Run
from loadmaster.laws.traffic import traffic_terms
from loadmaster.units import GIB

STATE = ("parameters", "gradients", "optimizer")


def price(model, layout, *, stack="deepspeed", seq_len=512, batch=8, on="8xh100-sxm", **work):
    workload = lm.Workload(global_batch_size=batch, seq_len=seq_len, **work)
    chosen = lm.Stack.named(stack)
    return memory_peak(model, lm.Cluster.parse(on), workload, lm.Layout.parse(layout), chosen)


def state(peak):
    return sum(number for name, number in peak.terms.items() if name.split("/")[0] in STATE)


OPT = {"model_type": "opt", "hidden_size": 2048, "word_embed_proj_dim": 2048, "ffn_dim": 8192, "num_hidden_layers": 24,
       "num_attention_heads": 32, "vocab_size": 50272, "max_position_embeddings": 2048}  # fmt: skip
GPT_J = {"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "vocab_size": 50400, "rotary_dim": 64}


@pytest.mark.parametrize(
    ("layout", "gib", "fits"),
    [
        ("", 19.606, False),
        ("dp_shard=2,zero=1", 12.254, True),
        ("dp_shard=2,zero=2", 11.029, True),
        ("dp_shard=2,zero=3", 9.803, True),
    ],
)
def test_states_of_opt_1_3b_against_one_16_gb_card(layout, gib, fits):
    """1.1: fp16 weights and gradients, fp32 masters and Adam: 16 bytes a parameter."""
    model = lm.Model.from_hf(OPT)
    assert model.num_params == 1315758080
    peak = price(model, f"{layout},precision=fp16-master", batch=2)
    assert state(peak) / GIB == pytest.approx(gib, rel=1e-3)
    assert (state(peak) <= 14.56 * GIB) is fits


def test_the_logits_of_llama_3_8b():
    """1.2: bf16 logits, their fp32 copy and its gradient."""
    model, workload = lm.Model.from_hf("meta-llama/Meta-Llama-3-8B"), lm.Workload(global_batch_size=1, seq_len=8192)
    run = Run.of(model, lm.Cluster.parse("8xh100-sxm"), workload, lm.Layout(), lm.Stack.named("loadmaster"))
    tensors = loss_tensors(run)
    assert (tensors["logits"], tensors["float"]) == (2101346304, 4202692608)
    logits = price(model, "", stack="loadmaster", seq_len=8192, batch=1).terms["logits"]
    assert logits / GIB + 5e-4 >= 9.785
    assert logits <= (9.785 + 3.914) * GIB + 2**20
    split = Run.of(model, run.cluster, workload, lm.Layout(tp=8), lm.Stack.named("loadmaster"))
    assert loss_tensors(split)["float"] == 525336576


def test_states_of_gpt_j_fully_sharded():
    """1.3: a figure that does not move with the number of cards is no sharded state."""
    model = lm.Model.from_hf(GPT_J)
    for cards, gib in ((2, 45.083), (4, 22.541)):
        peak = price(model, f"dp_shard={cards},zero=3,precision=fp16-master")
        assert state(peak) / GIB == pytest.approx(gib, rel=1e-3)
        assert {"buffers/all_gather", "buffers/buckets"} <= peak.terms.keys()  # what state leaves out is named
    assert model.embedding.num_params * 4 / GIB == pytest.approx(0.769, abs=5e-4)


def chain(length):
    """`length` linear layers of 256 in one block."""
    ops = [
        Op(name=f"linear.{i}", kind=OpKind.MATMUL, inputs=(f"x{i}",), outputs=(f"x{i + 1}",),
           weights=(Weight(name=f"{i}.weight", shape=(256, 256), multiplies=True),))
        for i in range(length)
    ]  # fmt: skip
    values = tuple(Value(name=f"x{i}", width=256) for i in range(length + 1))
    return Block(name="chain", prefix="", ops=tuple(ops), values=values, input="x0", output=f"x{length}")


def test_checkpointing_each_linear_layer_saves_nothing():
    """5.1: a linear layer keeps its input, and so does a checkpoint; one block of eight keeps one tensor."""
    stack, fp32 = lm.Stack.named("loadmaster"), lm.Precision.named("fp32")
    whole = saved_bytes(chain(8), stack, fp32, 137, 1)
    assert sum(whole.values()) == 1122304
    shape = Shape(batch=137, seq_len=1)
    assert 8 * input_polynomial(chain(1), fp32, stack)(shape) == 1122304
    assert input_polynomial(chain(8), fp32, stack)(shape) == 140288


def test_buckets_are_a_second_copy_of_the_gradients():
    """6.3: unless gradients are views of the buckets, as ours are."""
    model = lm.Model.from_hf("openai-community/gpt2-xl")
    copies = price(model, "dp_replicate=8,precision=fp32", stack="accelerate").terms["buffers/buckets"]
    assert copies == pytest.approx(6230444800, rel=0.01)
    ours = price(model, "dp_replicate=8,precision=fp32", stack="loadmaster").terms
    assert ours["buffers/buckets"] == 0


def test_what_stays_whole_dominates_frozen_models():
    """7.3: in units of the weights."""
    assert state_per_weight(1.0) == 4.0
    assert state_per_weight(0.1) == pytest.approx(1.3)
    assert state_per_weight(0.1, weight_shards=8, state_shards=8) == pytest.approx(0.1625)
    assert state_per_weight(0.1, state_shards=8) == pytest.approx(1.0375)


def test_adapters_leave_weights_as_the_largest_part():
    model = lm.Model.from_hf("mistralai/Mistral-7B-v0.1")
    work = {"frozen": "lora", "lora_rank": 16, "lora_targets": "attention", "stack": "accelerate"}
    whole = price(model, "precision=bf16", **work)
    four_bit = price(model, "precision=bf16", **{**work, "frozen": "qlora"})
    adapters = 16 * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    assert whole.terms["optimizer/exp_avg"] == 4 * adapters
    assert whole.terms["parameters"] == 2 * model.num_params + 4 * adapters
    assert four_bit.terms["parameters"] < 0.35 * whole.terms["parameters"]


SMOLLM = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
          "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
          "tie_word_embeddings": True}  # fmt: skip


def test_eight_bit_state_spares_embeddings_and_small_tensors():
    """9.3: blocks of 256 with one fp32 scale each; the token table and tensors under 4096 elements stay fp32."""
    model = lm.Model.from_hf(SMOLLM)
    full, coded = (price(model, f"optimizer_bits={bits}", stack="loadmaster") for bits in (32, 8))

    def optimizer(peak):
        return sum(number for name, number in peak.terms.items() if name.startswith("optimizer/"))

    assert (optimizer(full), optimizer(coded)) == (1076120064, 442427904)
    assert coded.terms["optimizer/scales"] > 0


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"),
    [(50257, 1, 50304), (50257, 2, 50432), (50257, 8, 51200), (151669, 4, 152064)],
)
def test_vocabulary_is_padded_to_128_rows_a_rank(vocab, tp, padded):
    """10.3"""
    model = lm.Model.from_hf({**SMOLLM, "vocab_size": vocab, "num_attention_heads": 8, "num_key_value_heads": 8})
    workload = lm.Workload(global_batch_size=8, seq_len=128)
    run = Run.of(model, lm.Cluster.parse("8xh100-sxm"), workload, lm.Layout(tp=tp), lm.Stack.named("megatron"))
    assert run.padded_vocab == padded


def test_the_sum_is_the_total_never_the_largest_part():
    peak = price(lm.Model.from_hf("gpt2"), "dp_shard=8,zero=1", stack="loadmaster")
    assert peak.total == sum(peak.terms.values()) > max(peak.terms.values())


def test_zero_stages_change_traffic_and_memory_together():
    model = lm.Model.from_hf("gpt2")
    workload = lm.Workload(global_batch_size=16, seq_len=128)
    seen = []
    for stage in range(4):
        layout = lm.Layout(dp_shard=4, zero=stage)
        seen.append((state(price(model, f"dp_shard=4,zero={stage}", stack="loadmaster", batch=16, seq_len=128)),
                     sum(traffic_terms(model, workload, layout).values())))  # fmt: skip
    assert [s for s, _ in seen] == sorted((s for s, _ in seen), reverse=True)
    assert len({s for s, _ in seen}) == 4
    assert seen[3][1] > seen[1][1]


def test_experts_that_get_more_tokens_keep_more():
    model = lm.Model.from_hf("mistralai/Mixtral-8x7B-v0.1")
    even = price(model, "dp_shard=8,ep=8,zero=1", stack="megatron", seq_len=4096)
    crowded = price(model, "dp_shard=8,ep=8,zero=1", stack="megatron", seq_len=4096, expert_imbalance=1.5)
    assert crowded.terms["activations/experts"] > 1.3 * even.terms["activations/experts"]


def test_total_alone_equals_the_sum_of_terms():
    model, cluster = lm.Model.from_hf("gpt2"), lm.Cluster.parse("8xh100-sxm")
    workload, stack = lm.Workload(global_batch_size=64, seq_len=512), lm.Stack.named("nanotron")
    for text in ("dp_shard=2,pp=4,zero=1", "tp=2,dp_shard=4", "dp_shard=8,zero=3,recompute=full"):
        layout = lm.Layout.parse(text)
        total = memory_total(model, cluster, workload, layout, stack)
        assert total == memory_peak(model, cluster, workload, layout, stack).total


def test_recomputing_the_first_blocks_lies_between_none_and_all():
    model = lm.Model.from_hf("meta-llama/Meta-Llama-3-8B")
    modes = ["", *(f"recompute=blocks,recompute_blocks={n}" for n in (1, 8, 16, 31)), "recompute=full"]
    totals = [price(model, mode, stack="megatron", seq_len=4096).total for mode in modes]
    assert totals == sorted(totals, reverse=True)
    assert totals[1] < totals[0]
