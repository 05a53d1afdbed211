"""Bad input, whatever the command: one line on stderr that names the field, status 2, nothing written, no traceback."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from loadmaster.cli.main import main
from loadmaster.describe.cluster import Cluster, Device, Link
from loadmaster.describe.layout import Layout
from loadmaster.describe.plan_file import PlanFile
from loadmaster.describe.workload import Workload
from loadmaster.errors import InvalidInput
from loadmaster.ledger import Ledger

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128,
}  # fmt: skip
LINK = Link(latency=1e-6, bandwidth=1e9)
CLUSTER = Cluster(
    device=Device(name="card", memory_bytes=1 << 30, memory_bandwidth=1e11, peak_flops={"fp32": 1e12}),
    devices_per_node=2, num_nodes=1, intra_node=LINK, inter_node=LINK,
)  # fmt: skip
PLAN = PlanFile(
    name="tiny", config=LLAMA, cluster=CLUSTER, workload=Workload(global_batch_size=4, seq_len=64),
    layout=Layout(dp_shard=2, zero=1), predicted={"memory": Ledger("bytes", {"parameters": 8})},
)  # fmt: skip


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command that has to refuse; its one line."""

    def run(*args: object) -> str:
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        assert (end.value.code, out) == (2, ""), (args, out, err)
        assert re.fullmatch(r"loadmaster: [^\n]+\n", err), err
        return err

    return run


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--seq", "1e400"), "--seq"),
        (("--seq", "9" * 500), "--seq"),
        (("--batch", "1e400"), "--batch"),
        (("--seq", "1024", "--batch", "1" + "0" * 15), "--batch times --seq"),
        (("--memory-cap", "1e300"), "--memory-cap"),
        (("--layout", "tp"), "layout.tp"),
        (("--layout", "tp="), "layout.tp"),
        (("--layout", "vocab_padding=-1"), "layout.vocab_padding"),
        (("--layout", "micro_batch_size=0"), "layout.micro_batch_size"),
        (("--bogus",), "--bogus"),
        (("--seq",), "--seq"),
        (("extra",), "extra"),
    ],
)
def test_price(refused: Any, args: tuple[str, ...], says: str) -> None:
    assert says in refused("price", "gpt2", *args)


def test_every_command_s_usage_is_one_line(refused: Any) -> None:
    for command in ("price", "plan", "export", "validate", "compare", "catalog"):
        assert "--help" in refused(command, "--no-such-option")


NEVER = ("-1", "nan", "inf", "'x'", "[]", "true")
WRONG = {
    "devices_per_node": (*NEVER, "0", "1.5"), "num_nodes": (*NEVER, "0", "1.5"), "memory_bytes": (*NEVER, "0", "1.5"),
    "memory_bandwidth": (*NEVER, "0"), "fp32": (*NEVER, "0"), "latency": NEVER, "bandwidth": (*NEVER, "0"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "bad"), [(name, bad) for name, values in WRONG.items() for bad in values])
def test_a_cluster_file_holds_numbers_that_can_be(refused: Any, tmp_path: Path, name: str, bad: str) -> None:
    good = PLAN.to_toml()
    cluster = good[good.index("[cluster]") : good.index("[predicted")].replace("[cluster]\n", "")
    text = re.sub(rf"(?m)^{name} = .*$", f"{name} = {bad}", cluster.replace("cluster.", ""), count=1)
    path = tmp_path / "here.toml"
    path.write_text(text)
    assert name in refused("price", "gpt2", "--on", path)


def test_a_cluster_file_without_a_field(refused: Any, tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    path.write_text("[device]\nname = 'card'\n")
    assert "cluster.intra_node = missing" in refused("price", "gpt2", "--on", path)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("seq_len", "nan"), ("causal", "'x'"), ("loss", "'x'"), ("lora_rank", "-1"), ("expert_imbalance", "nan"),
        ("expert_imbalance", "0.5"), ("sequence_parallel", "[]"), ("recompute_blocks", "[]"), ("vocab_padding", "nan"),
        ("replicate_kv_heads", "1"), ("offload_optimizer", "'x'"), ("bucket_bytes", "9" * 30), ("zero", "true"),
        ("stack", "[]"), ("parameters", "'x'"), ("parameters", "nan"),
    ],
)  # fmt: skip
def test_a_plan_file_holds_what_its_fields_may(refused: Any, tmp_path: Path, name: str, bad: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(re.sub(rf"(?m)^{name} = .*$", f"{name} = {bad}", PLAN.to_toml(), count=1))
    assert name in refused("export", path, "--to", "deepspeed")


@pytest.mark.parametrize(
    "body",
    [
        "[" * 100_000, "[]", '{"measured": 5}', '{"measured": {"memory": 5}}', '{"measured": {}, "predicted": 5}',
        '{"measured": {"memory": {"unit": "bytes", "terms": {"a": null}}}}', '{"measured": {}, "summary": 5}',
        '{"measured": {"memory": {"unit": "bytes", "terms": {"a": NaN}}}}',
    ],
)  # fmt: skip
def test_a_garbled_ledger(refused: Any, tmp_path: Path, body: str) -> None:
    path = tmp_path / "ledger.json"
    path.write_text(body)
    refused("compare", path)


def test_compare_asks_a_tolerance_that_can_be(refused: Any) -> None:
    assert "--tolerance" in refused("compare", "anywhere", "--tolerance", "nan")


def test_plan_refuses_its_output_before_the_search(refused: Any, tmp_path: Path) -> None:
    plan = ("plan", "gpt2", "--on", "2xh100-sxm", "--batch", "2")
    assert "output" in refused(*plan, "-o", "")
    assert "output" in refused(*plan, "-o", tmp_path / "none" / "plan.toml")
    assert "--price" in refused(*plan, "--price", "nan", "--objective", "dollars")


def test_a_config_nested_beyond_reading(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert "config.json" in refused("price", tmp_path)


@pytest.mark.parametrize("bad", [0, -1, "8", 1.5, None, [8], True])
def test_values_are_legal_from_birth(bad: Any) -> None:
    with pytest.raises(InvalidInput, match=r"workload\.seq_len"):
        Workload(global_batch_size=1, seq_len=bad)
    with pytest.raises(InvalidInput, match=r"layout\.tp"):
        Layout(tp=bad)
    with pytest.raises(InvalidInput, match=r"device\.memory_bytes"):
        Device(name="card", memory_bytes=bad, memory_bandwidth=1.0)


def test_counts_are_exact() -> None:
    assert Layout.parse("bucket_bytes=9007199254740993").bucket_bytes == 9007199254740993
    assert json.loads(json.dumps(Layout.parse("zero=1").to_dict()))["zero"] == 1


def test_export_names_the_stack_to_plan_for(refused: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.to_toml().replace("zero = 1", "zero = 3"))
    assert "--stack megatron" in refused("export", path, "--to", "megatron")


def test_a_cluster_keeps_every_figure_of_its_links() -> None:
    slow = Link(latency=1e-6, bandwidth=1e9, gamma=1e-7)
    cluster = Cluster(device=CLUSTER.device, devices_per_node=2, num_nodes=1, intra_node=slow, inter_node=LINK)
    assert Cluster.from_dict(cluster.to_dict()) == cluster


def test_names_are_printed_as_given(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a:factory:b.json").write_text(json.dumps(LLAMA))
    with pytest.raises(SystemExit):
        main(["price", str(tmp_path / "a:factory:b.json"), "--seq", "64"])
    assert ":factory:" in capsys.readouterr().out.replace("\n", "")


def test_training_options_are_numbers_that_can_be() -> None:
    pytest.importorskip("torch")
    from loadmaster.runtime.audit_plan import audit_plan
    from loadmaster.runtime.verify import verify

    for name, bad in (("steps", -1), ("lr", -1.0), ("eps", float("nan")), ("seq_len", 0), ("weight_decay", -1.0)):
        with pytest.raises(InvalidInput, match="must be a"):
            audit_plan("anywhere.toml", **{name: bad})
    for name, bad in (("steps", 0), ("seq_len", 0), ("tolerance", float("nan"))):
        with pytest.raises(InvalidInput, match="must be a"):
            verify(PLAN, **{name: bad})


def test_ranks_threads_and_data_that_can_be(refused: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "plan.toml"
    PLAN.save(path)
    train = ("train", path, "-o", tmp_path / "run")
    assert "--data" in refused(*train, "--data", "")
    assert "--threads" in refused(*train, "--data", "stdlib", "--threads", "0")
    assert "clip" in refused(*train, "--data", "stdlib", "--clip", "nan")
    trace = ("trace", "gpt2", "--seq", "8")
    assert "--rank" in refused(*trace, "--rank", "9")
    assert "--stage" in refused(*trace, "--layout", "pp=2", "--stage", "2")
    assert "--micro-batches" in refused(*trace, "--layout", "pp=2", "--micro-batches", "0")
    assert "--steps" in refused(*trace, "--steps", "0")
    assert not (tmp_path / "run").exists()


def test_positions_are_a_count_in_every_family(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": "many"}))
    assert "config.max_position_embeddings" in refused("price", tmp_path)


def test_a_plan_is_exported_from_its_file_too(tmp_path: Path) -> None:
    import loadmaster as lm

    PLAN.save(tmp_path / "plan.toml")
    assert lm.export(tmp_path / "plan.toml", "deepspeed") == lm.export(PLAN, "deepspeed")


def test_a_misspelt_field_of_a_device_is_not_passed_over(refused: Any, tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    path.write_text("[device]\nname = 'card'\n[device.peak_flopz]\nbf16 = 1e12\n")
    assert "peak_flopz" in refused("price", "gpt2", "--on", path)
