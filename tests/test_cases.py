"""What people who train models ran into, answered by the commands: memory budgets, layouts, pipelines."""

import json
from typing import Any

import pytest

from loadmaster.cli.main import main
from loadmaster.describe.cluster import Cluster
from loadmaster.describe.toml import dumps
from loadmaster.units import GIB, MIB

OPT = {
    "model_type": "opt", "hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
    "vocab_size": 50272, "word_embed_proj_dim": 2048, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
GPT_J = {
    "model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048, "rotary_dim": 64,
    "vocab_size": 50400, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = "meta-llama/Meta-Llama-3-8B"


def llama(**fields: Any) -> dict[str, Any]:
    """A small Llama-shaped config with what a case asks for."""
    base = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512, "max_position_embeddings": 65536,
    }  # fmt: skip
    return base | fields


@pytest.fixture
def ask(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command with --json; the document (None when it printed none), the exit status, what went to stderr."""

    def run(command: str, model: str | dict[str, Any], *args: str) -> tuple[Any, int, str]:
        if isinstance(model, dict):
            (tmp_path / "config.json").write_text(json.dumps(model))
            model = str(tmp_path / "config.json")
        with pytest.raises(SystemExit) as end:
            main([command, model, *args, "--json"])
        out, err = capsys.readouterr()
        return json.loads(out) if out else None, int(end.value.code or 0), err

    return run


def states(document: Any) -> int:
    """Parameters, gradients and optimizer state, without temporaries."""
    terms = document["memory"]["terms"]
    names = ("parameters", "gradients", "optimizer/master", "optimizer/exp_avg", "optimizer/exp_avg_sq")
    return sum(terms.get(name, 0) for name in names)


# --- memory budgets


@pytest.mark.parametrize(
    ("gpus", "zero", "gib", "fits"), [(1, 0, 19.606, 1), (2, 1, 12.254, 0), (2, 2, 11.029, 0), (2, 3, 9.803, 0)]
)
def test_a_small_model_on_a_small_card(ask: Any, gpus: int, zero: int, gib: float, fits: int) -> None:
    document, status, _ = ask(
        "price", OPT, "--on", f"{gpus}xa100-sxm-80gb", "--memory-cap", "14.56GiB", "--seq", "512",
        "--layout", f"zero={zero},precision=fp16-master",
    )  # fmt: skip
    assert document["model"]["num_params"] == 1315758080
    assert states(document) == pytest.approx(gib * GIB, rel=1e-3)
    assert status == fits


def test_no_batch_helps_one_card_and_two_are_enough(ask: Any) -> None:
    cap = ("--memory-cap", "14.56GiB", "--seq", "512", "--batch", "2", "--precision", "fp16-master")
    document, status, err = ask("plan", OPT, "--on", "1xa100-sxm-80gb", *cap, "--optimizer-bits", "32")
    assert (status, document["plans"]) == (1, [])
    assert "nothing fits" in err
    document, status, _ = ask("plan", OPT, "--on", "2xa100-sxm-80gb", *cap, "--optimizer-bits", "32")
    assert status == 0
    assert all(p["layout"]["zero"] for p in document["plans"])


def test_logits_are_most_of_the_memory(ask: Any) -> None:
    document, _, _ = ask("price", LLAMA, "--on", "8xh100-sxm", "--seq", "8192", "--layout", "zero=3,recompute=full")
    elements = 8192 * 128256
    bf16, fp32 = 2 * elements, 4 * elements
    assert (bf16, fp32) == (2101346304, 4202692608)
    assert bf16 + 2 * fp32 <= document["memory"]["terms"]["logits"] <= bf16 + 3 * fp32


def test_a_parallel_vocabulary_divides_the_logits(ask: Any) -> None:
    args = ("--on", "8xh100-sxm", "--seq", "8192", "--stack", "megatron", "--batch", "8")
    whole, _, _ = ask("price", LLAMA, *args, "--layout", "zero=1,recompute=full")
    split, _, _ = ask("price", LLAMA, *args, "--layout", "tp=8,dp_shard=1,recompute=full")
    share = whole["memory"]["terms"]["logits"] / 8  # the vocabulary is padded to 128 * tp rows: 128256 -> 129024
    assert split["memory"]["terms"]["logits"] == pytest.approx(share * 129024 / 128256, rel=1e-3)


def test_a_fused_loss_keeps_no_fp32_logits(ask: Any) -> None:
    args = ("--on", "8xh100-sxm", "--seq", "8192", "--layout", "zero=3,recompute=full")
    eager, _, _ = ask("price", LLAMA, *args)
    fused, _, _ = ask("price", LLAMA, *args, "--loss", "fused")
    assert fused["memory"]["total"] < eager["memory"]["total"] - 4202692608
    assert "loss=fused" in [r["change"] for r in eager["remedies"]]


@pytest.mark.parametrize(("gpus", "gib"), [(2, 45.083), (4, 22.541)])
def test_sharded_state_moves_with_the_number_of_cards(ask: Any, gpus: int, gib: float) -> None:
    document, _, _ = ask(
        "price", GPT_J, "--on", f"{gpus}xa100-sxm-80gb", "--layout", "zero=3,precision=fp16-master", "--seq", "512"
    )
    assert states(document) == pytest.approx(gib * GIB, rel=1e-3)
    for what_a_bare_estimate_leaves_out in ("activations/mlp", "buffers/all_gather", "logits", "context"):
        assert document["memory"]["terms"][what_a_bare_estimate_leaves_out] > 0


def test_the_total_is_the_sum_not_the_largest_part(ask: Any) -> None:
    document, _, _ = ask("price", LLAMA, "--on", "8xh100-sxm", "--layout", "zero=3")
    assert document["memory"]["total"] == sum(document["memory"]["terms"].values())
    assert document["memory"]["low"] < document["memory"]["total"] < document["memory"]["high"]


def test_zero_stages_change_memory_and_traffic_together(ask: Any) -> None:
    """Each stage keeps less and, with accumulation, sends more: 2 scatters every micro-batch, 3 gathers as well."""
    sizes, sent = [], []
    for zero in (0, 1, 2, 3):
        document, _, _ = ask(
            "price", "meta-llama/Llama-3.2-1B", "--on", "8xh100-sxm", "--batch", "32", "--layout", f"zero={zero}"
        )
        sizes.append(document["memory"]["total"])
        sent.append(document["traffic"]["total"])
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4
    assert sent[0] == sent[1] < sent[2] < sent[3]


def test_a_device_without_a_known_peak_gets_no_utilisation(ask: Any, tmp_path: Any) -> None:
    cluster = tmp_path / "mine.toml"
    table = Cluster.parse("2xh100-sxm").to_dict()
    table["device"] |= {"name": "mine", "peak_flops": {}}
    cluster.write_text(dumps(table))
    document, status, _ = ask("price", llama(), "--on", str(cluster), "--seq", "512")
    assert status == 0
    assert document["mfu"] is None
    assert document["hfu"] is None
    assert document["flops_per_second_per_device"] > 0
    assert "no peak is known for mine" in document["notes"][0]


# --- layouts


@pytest.mark.parametrize(
    ("heads", "kv", "devices", "valid"),
    [(28, 4, 8, [1, 2, 4]), (52, 52, 8, [1, 2, 4])],
)
def test_tensor_parallel_sizes(ask: Any, heads: int, kv: int, devices: int, valid: list[int]) -> None:
    config = llama(num_attention_heads=heads, num_key_value_heads=kv, hidden_size=64 * heads, head_dim=64)
    good = []
    for tp in (1, 2, 4, 8):
        args = ("--on", f"{devices}xh100-sxm", "--stack", "megatron", "--batch", "8", "--layout")
        _, status, err = ask("price", config, *args, f"tp={tp}")
        if status == 0:
            good.append(tp)
        else:
            assert f"{heads} % {tp}" in err
            assert "use tp = 1 or 2 or 4" in err
    assert good == valid


def test_a_plan_says_why_a_tensor_parallel_size_is_refused(ask: Any) -> None:
    document, _, _ = ask("plan", "Qwen/Qwen2-7B", "--on", "8xh100-sxm", "--batch", "32", "--stack", "megatron")
    assert {p["layout"]["tp"] for p in document["plans"]} <= {1, 2, 4}
    refused = [r for r in document["rejections"] if r["layout"]["tp"] == 8 and "28 % 8" in r["rule"]]
    assert refused
    assert "use tp = 2 or 4" in refused[0]["way_out"] or "use tp = 1 or 2 or 4" in refused[0]["way_out"]


def test_two_kv_groups_at_tp_eight(ask: Any) -> None:
    config = llama(num_attention_heads=32, num_key_value_heads=2, hidden_size=2048)
    args = ("--on", "8xh100-sxm", "--stack", "megatron", "--layout")
    _, status, err = ask("price", config, *args, "tp=8")
    assert status == 2
    assert "replicate_kv_heads=true" in err
    _, status, _ = ask("price", config, *args, "tp=8,replicate_kv_heads=true")
    assert status == 0


def test_global_batches(ask: Any) -> None:
    _, status, err = ask("price", llama(), "--on", "7xh100-sxm", "--batch", "256", "--layout", "micro_batch_size=2")
    assert status == 2
    assert "252 or 266" in err
    document, _, _ = ask("price", llama(), "--on", "8xh100-sxm", "--batch", "256", "--layout", "micro_batch_size=2")
    assert document["derived"]["num_micro_batches"] == 16
    document, _, _ = ask(
        "price", llama(), "--on", "16xh100-sxm", "--batch", "64", "--layout", "tp=4,pp=2,micro_batch_size=4"
    )
    assert (document["derived"]["dp"], document["derived"]["num_micro_batches"]) == (2, 8)


@pytest.mark.parametrize(
    ("vocab", "tp", "rows"), [(50257, 1, 50304), (50257, 2, 50432), (50257, 8, 51200), (151669, 4, 152064)]
)
def test_vocabularies_are_padded(ask: Any, vocab: int, tp: int, rows: int) -> None:
    args = ("--on", "8xh100-sxm", "--stack", "megatron", "--layout")
    document, _, _ = ask("price", llama(vocab_size=vocab), *args, f"tp={tp}")
    assert document["derived"]["padded_vocab_size"] == rows


def test_a_vocabulary_that_may_not_be_padded(ask: Any) -> None:
    _, status, err = ask("price", llama(vocab_size=50257), "--on", "2xh100-sxm", "--layout", "tp=2,vocab_padding=1")
    assert status == 2
    assert "50257 % 2" in err


# --- pipelines


@pytest.mark.parametrize(("layers", "pp", "most"), [(30, 4, 8), (61, 8, 8), (27, 2, 14), (40, 16, 3)])
def test_every_layer_is_on_a_stage(ask: Any, layers: int, pp: int, most: int) -> None:
    document, _, _ = ask(
        "price", llama(num_hidden_layers=layers), "--on", f"{pp}xh100-sxm", "--batch", "16", "--stack", "megatron",
        "--layout", f"pp={pp}",
    )  # fmt: skip
    split = document["derived"]["layers_per_stage"]
    assert (sum(split), max(split)) == (layers, most)
    assert max(split) - min(split) <= 1


def test_fewer_micro_batches_than_stages(ask: Any) -> None:
    document, status, _ = ask("price", llama(), "--on", "4xh100-sxm", "--batch", "2", "--layout", "pp=4")
    assert status == 0
    assert document["bubble_fraction"] == pytest.approx(0.6)


@pytest.mark.parametrize("virtual", [1, 2])
def test_a_larger_micro_batch_enlarges_the_bubble(ask: Any, virtual: int) -> None:
    schedule = "interleaved_1f1b" if virtual > 1 else "1f1b"
    expected = {1: [0.1795, 0.3043, 0.4667], 2: [0.0986, 0.1795, 0.3043]}[virtual]
    found = []
    for micro in (1, 2, 4):
        document, _, _ = ask(
            "price", llama(num_hidden_layers=16), "--on", "64xh100-sxm", "--batch", "256",
            "--layout", f"pp=8,dp_shard=8,micro_batch_size={micro},schedule={schedule},virtual_stages={virtual}",
        )  # fmt: skip
        found.append(document["bubble_fraction"])
    assert found == pytest.approx(expected, rel=1e-3)


# --- bad input, one message, no traceback


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (("--on", "8xh200x"), "cluster.device"),
        (("--on", "8xh100-sxm", "--memory-cap", "lots"), "--memory-cap"),
        (("--on", "8xh100-sxm", "--layout", "tp"), "layout.tp"),
        (("--on", "8xh100-sxm", "--layout", "zero=7"), "layout.zero"),
        (("--on", "8xh100-sxm", "--stack", "nosuch"), "stack"),
        (("--on", "8xh100-sxm", "--seq", "0"), "--seq"),
        (("--on", "8xh100-sxm", "--batch", "0"), "global_batch_size"),
        (("--on", "absent.toml",), "cluster"),
        (("--on", "8xh100-sxm", "--layout", "dp_shard=4"), "8 devices"),
        (("--on", "0xh100-sxm"), "num_devices"),
        (("--on", "8xh100-sxm", "--loss", "none"), "--loss"),
        (("--on", "8xh100-sxm", "--layout", "tp=1,tp=2"), "given twice"),
        (("--on", "8xh100-sxm", "--layout", "recompute=blocks,recompute_blocks=99"), "recompute_blocks"),
        (("--on", "8xh100-sxm", "--batch", "100000000000000000"), "--batch"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message(ask: Any, args: tuple[str, ...], match: str) -> None:
    document, status, err = ask("price", llama(), *args)
    assert (document, status) == (None, 2)
    assert match in err
    assert len(err.strip().splitlines()) == 1


def test_a_cap_too_small_for_anything(ask: Any, tmp_path: Any) -> None:
    out = tmp_path / "plan.toml"
    document, status, err = ask(
        "plan", llama(), "--on", "2xh100-sxm", "--batch", "4", "--memory-cap", str(MIB), "-o", str(out)
    )
    assert status == 1
    assert document["plans"] == []
    assert "the leanest layout" in err
    assert not out.exists()
