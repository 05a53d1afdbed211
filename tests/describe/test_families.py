"""Counts of the families, exactly and without torch; what a bad config is told."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from loadmaster.describe.families import FAMILIES, catalogue, from_hf
from loadmaster.describe.model import Block, Model
from loadmaster.describe.op import OpKind
from loadmaster.errors import InvalidInput, LoadmasterError

LINES = (Path(__file__).parent / "counts.tsv").read_text().splitlines()
ROWS = list(csv.DictReader((line for line in LINES if not line.startswith("#")), delimiter="\t"))
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip


def trainable(block: Block) -> int:
    return sum(w.num_params for w in block.weights if w.trainable)


def layers(model: Model) -> list[Block]:
    """Blocks of the decoder, or of the encoder where that is all there is."""
    blocks = list(model.layer_blocks())
    return [b for b in blocks if not b.name.startswith("encoder")] or blocks


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["model"])
def test_counts_are_exact(row: dict[str, str]) -> None:
    model = from_hf(row["model"])
    blocks = layers(model)
    found = (
        model.num_params, model.num_trainable_params, model.num_active_params, trainable(blocks[0]),
        trainable(blocks[-1]),
    )  # fmt: skip
    assert found == tuple(int(row[k]) for k in ("total", "trainable", "active", "first", "last"))
    tables = {w.name: w for op in model.embedding.ops if op.kind is OpKind.EMBEDDING for w in op.weights}
    vocabulary = [w.numel for w in tables.values() if w.shape[0] == model.vocab_size]
    if model.family != "vit":
        assert vocabulary == [int(row["embedding"])]
    assert sum(w.num_params for w in model.head.weights if w.multiplies and w.shape[0] == model.vocab_size) in (
        int(row["untied_head"]), int(row["untied_head"]) - 1000,
    )  # fmt: skip


def test_case_3_3_the_lookup_costs_nothing_and_the_head_always_multiplies() -> None:
    tied = from_hf("meta-llama/Llama-3.2-1B")
    assert tied.matmul_params == 1235746816
    untied = from_hf("meta-llama/Meta-Llama-3-8B")
    assert untied.matmul_params == 7504658432
    assert round(untied.num_params / untied.matmul_params, 2) == 1.07


def test_case_3_4_gates_and_experts_count() -> None:
    assert from_hf("meta-llama/Llama-2-7b-hf").num_params == 6738415616
    mixtral = from_hf("mistralai/Mixtral-8x7B-v0.1")
    assert (mixtral.num_params, mixtral.num_active_params) == (46702792704, 12879925248)


def test_case_3_2_kv_heads_shrink_only_the_kv_projections() -> None:
    base = json.loads(catalogue()["meta-llama/Meta-Llama-3-8B"].read_text())
    for kv, params in ((8, 8388608), (32, 33554432)):
        block = from_hf(base | {"num_key_value_heads": kv}).blocks[0][0]
        weights = {w.name: w.numel for w in block.weights}
        assert weights["self_attn.k_proj.weight"] + weights["self_attn.v_proj.weight"] == params
        core = block.attention
        assert core is not None
        assert 2 * 2 * core.num_heads * core.head_dim * core.mean_keys(8192, count_causal=False) == 134217728
    window = from_hf("mistralai/Mistral-7B-v0.1").blocks[0][0].attention
    assert window is not None
    assert window.window == 4096
    assert round(window.mean_keys(32768, count_causal=True), 2) == 3840.06


@pytest.mark.parametrize(
    ("name", "longest"),
    [("gpt2", 1024), ("facebook/opt-1.3b", 2048), ("google-bert/bert-base-uncased", 512), ("openai/whisper-base", 448),
     ("meta-llama/Meta-Llama-3-8B", None), ("bigscience/bloom", None), ("google-t5/t5-small", None)],
)  # fmt: skip
def test_only_a_table_of_positions_bounds_the_sequence(name: str, longest: int | None) -> None:
    assert from_hf(name).max_seq_len == longest


def test_case_9_3_smollm() -> None:
    model = from_hf(
        LLAMA | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                 "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}
    )  # fmt: skip
    assert model.num_params == 134515008
    assert sum(w.numel for _, w in model.named_weights() if w.numel < 4096) == 35136


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, r"config\.hidden_size = 0: must lie between 1 and"),
        ({"num_hidden_layers": -3}, r"config\.num_hidden_layers = -3: must lie between 1"),
        ({"hidden_size": 10**15}, r"config\.hidden_size = 10+: must lie between"),
        ({"vocab_size": None}, r"config\.vocab_size = missing: is needed"),
        ({"intermediate_size": "96"}, r"config\.intermediate_size = '96': must be a whole number"),
        ({"intermediate_size": 96.5}, r"config\.intermediate_size = 96\.5: must be a whole number"),
        ({"num_attention_heads": True}, r"config\.num_attention_heads = True: must be a whole number"),
        (
            {"num_attention_heads": 6},
            r"config\.num_attention_heads = 6: must divide hidden_size = 64; use e.g. 2, 4, 8",
        ),
        ({"num_key_value_heads": 3}, r"config\.num_key_value_heads = 3: must divide num_attention_heads = 4"),
        ({"attention_dropout": 2}, r"config\.attention_dropout = 2: must be a rate"),
        ({"tie_word_embeddings": "yes"}, r"config\.tie_word_embeddings = 'yes': must be true or false"),
        ({"model_type": None}, r"config\.model_type = None: must name the architecture"),
        ({"architectures": "LlamaForCausalLM"}, r"config\.architectures = LlamaForCausalLM: must be a list"),
        (
            {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5},
            r"config\.num_experts_per_tok = 5: must not exceed the 4 experts; use 1 to 4",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention"]},
            r"config\.layer_types = .*: must list one entry for each of 2 layers",
        ),
    ],
)
def test_bad_configs_are_told_field_value_rule_and_way_out(change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        from_hf(LLAMA | change)


def test_unknown_names_suggest_close_ones() -> None:
    with pytest.raises(InvalidInput, match=r"llama-3-8c.*did you mean .*meta-llama/Meta-Llama-3-8B"):
        from_hf("llama-3-8c")


def test_bad_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(InvalidInput, match="is no JSON"):
        from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(InvalidInput, match="holds no JSON object"):
        from_hf(tmp_path / "config.json")
    with pytest.raises(InvalidInput, match="no such config file"):
        from_hf(tmp_path / "missing.json")


def test_folder_file_dict_and_names_agree(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert from_hf(tmp_path).num_params == from_hf(str(tmp_path / "config.json")).num_params
    assert from_hf(LLAMA).num_params == from_hf(tmp_path).num_params
    assert from_hf("gpt2").num_params == from_hf("openai-community/gpt2").num_params
    assert from_hf("llama-3-8b").num_params == from_hf("meta-llama/Meta-Llama-3-8B").num_params


def test_without_the_runtime_an_unknown_type_is_refused_and_no_torch_is_imported() -> None:
    refused = "config.architectures = ['Qwen2ForTokenClassification']: of qwen2 only Qwen2ForCausalLM and"
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from loadmaster.describe import families\n"
        "families.find_spec = lambda name: None\n"
        "from loadmaster.errors import LoadmasterError\n"
        "try: families.from_hf({'model_type': 'mamba'})\n"
        "except LoadmasterError as error: print(error)\n"
        "raw = {'model_type': 'qwen2', 'architectures': ['Qwen2ForTokenClassification']}\n"
        "try: families.from_hf(raw)\n"
        "except LoadmasterError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.search(
        r"config\.model_type = mamba: is none of those written out here .*loadmaster\[runtime\]", done.stdout
    )
    assert refused in done.stdout


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_every_catalogue_model_has_a_connected_dataflow(name: str) -> None:
    model = from_hf(name)
    assert json.loads(catalogue()[name].read_text())["model_type"] in FAMILIES
    for block, _ in model.parts():
        made = {block.input} | {v for op in block.ops for v in op.outputs}
        assert block.output in made
        produced = [v for op in block.ops for v in op.outputs]
        assert len(produced) == len(set(produced)), "a value is made twice"
        for op in block.ops:
            for value in op.inputs:
                known = (
                    value in made
                    or block.value(value).alias
                    or value in ("labels", "input_ids", "encoder.last", "spectrogram", "pixels")
                )
                assert known, f"{block.name}.{op.name} reads {value}, which nothing makes"
    assert len(model.layer_blocks()) == model.num_layers


def test_every_refusal_is_a_user_error() -> None:
    for model_type in FAMILIES:
        with pytest.raises(LoadmasterError):
            from_hf({"model_type": model_type})
