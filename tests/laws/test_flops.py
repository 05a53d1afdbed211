"""FLOPs and utilisation: worked cases from public reports."""

import pytest

import loadmaster as lm
from loadmaster.describe.op import Attention
from loadmaster.laws.flops import backward_over_forward, block_flops, flops, palm_flops_per_token, utilisation

LLAMA_2_7B = "meta-llama/Llama-2-7b-hf"
LLAMA_3_8B = "meta-llama/Meta-Llama-3-8B"


def test_mfu_against_the_dense_peak() -> None:
    # foundation-model-stack/fms-fsdp issue 89, NVIDIA/Megatron-LM issue 1565
    model = lm.Model.from_hf(LLAMA_2_7B)
    assert palm_flops_per_token(model, 4096) == 46_872_944_640
    achieved = 9600 * palm_flops_per_token(model, 4096)
    h100 = lm.Cluster.parse("h100-sxm").device
    assert achieved / 1e12 == pytest.approx(450.0, rel=0.01)
    assert utilisation(achieved, h100, "bf16") == pytest.approx(0.4548, rel=0.01)
    assert utilisation(420e12, lm.Cluster.parse("h200").device, "bf16") == pytest.approx(0.4245, rel=0.01)
    assert utilisation(1.04 * 312e12, h100, "bf16") == pytest.approx(0.328, rel=0.01)


def test_an_unknown_device_gets_no_percentage() -> None:
    device = lm.Device(name="mystery", memory_bytes=1 << 30, memory_bandwidth=1e12)
    assert utilisation(1e14, device, "bf16") is None


@pytest.mark.parametrize("kv_heads", [8, 32])
def test_grouped_heads_do_not_make_scores_cheaper(kv_heads: int) -> None:
    # allenai/OLMo-core PR 478
    config = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 1, "num_attention_heads": 32,
        "num_key_value_heads": kv_heads, "intermediate_size": 14336, "vocab_size": 128256,
    }  # fmt: skip
    block = lm.Model.from_hf(config).blocks[0][0]
    assert block_flops(block, 8192).attention / 8192 == 134_217_728
    k_and_v = [w for w in block.weights if w.name in ("self_attn.k_proj.weight", "self_attn.v_proj.weight")]
    assert sum(w.numel for w in k_and_v) == {8: 8_388_608, 32: 33_554_432}[kv_heads]


def test_a_window_caps_the_keys() -> None:
    core = lm.Model.from_hf("mistralai/Mistral-7B-v0.1").blocks[0][0].attention
    assert isinstance(core, Attention)
    assert core.mean_keys(32768, count_causal=True) == pytest.approx(3840.06, rel=1e-5)
    whole = Attention(num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128)
    assert whole.mean_keys(32768, count_causal=True) == 16384.5
    assert whole.mean_keys(32768, count_causal=False) == 32768


@pytest.mark.parametrize(("name", "right"), [("meta-llama/Llama-3.2-1B", 1_235_746_816), (LLAMA_3_8B, 7_504_658_432)])
def test_the_look_up_costs_nothing_and_the_head_always_counts(name: str, right: int) -> None:
    # huggingface/trl PR 6709, pytorch/torchtitan PR 280
    model, work = lm.Model.from_hf(name), lm.Workload(global_batch_size=1, seq_len=1024)
    assert model.matmul_params == right
    attention = sum(block_flops(b, 1024).attention * n for b, n in model.blocks)
    assert flops(model, work, lm.Layout())["forward"] == 2 * right * 1024 + attention


def test_three_forwards_and_where_that_is_wrong() -> None:
    model, work = lm.Model.from_hf(LLAMA_3_8B), lm.Workload(global_batch_size=4, seq_len=8192)
    plain = flops(model, work, lm.Layout())
    assert plain["model"] == 3 * plain["forward"] == plain["hardware"]
    full = flops(model, work, lm.Layout(recompute="full"))
    some = flops(model, work, lm.Layout(recompute="selective"))
    blocks = flops(model, work, lm.Layout(recompute="blocks", recompute_blocks=16))
    assert plain["hardware"] < some["hardware"] < blocks["hardware"] < full["hardware"]
    assert blocks["recompute"] == full["recompute"] / 2
    assert full["model"] == plain["model"]  # MFU does not see recompute
    ratios = backward_over_forward(model, work, lm.Layout(recompute="full"))
    assert 3 < ratios["step"] < 4.2
    assert ratios["attention (flash)"] == 2.5


def test_causal_counts_half_the_square() -> None:
    model = lm.Model.from_hf("gpt2")
    full = flops(model, lm.Workload(global_batch_size=1, seq_len=1024), lm.Layout())
    half = flops(model, lm.Workload(global_batch_size=1, seq_len=1024, causal=True), lm.Layout())
    attention = sum(block_flops(b, 1024).attention * n for b, n in model.blocks)
    assert full["forward"] - half["forward"] == pytest.approx(attention * (1 - 1025 / 2048))


def test_encoders_and_patches_are_counted_by_their_own_tokens() -> None:
    vit = lm.Model.from_hf("google/vit-base-patch16-224")
    work = lm.Workload(global_batch_size=1, seq_len=224)
    # about 17.5 GMACs, as the paper's tables give for 197 tokens (Dosovitskiy et al. 2021; DeiT's reports say 17.6)
    assert flops(vit, work, lm.Layout())["forward"] / 2e9 == pytest.approx(17.5, rel=0.02)
