"""Exports say what the plan says, in files that the target's own parser accepts (where it is installed)."""

import json
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from loadmaster.describe.cluster import Cluster
from loadmaster.describe.families import read_config
from loadmaster.describe.layout import Layout
from loadmaster.describe.plan_file import PlanFile
from loadmaster.describe.workload import Workload
from loadmaster.errors import InvalidInput
from loadmaster.export.api import TARGETS, export


def plan(layout: Layout, *, model: str = "meta-llama/Meta-Llama-3-8B", devices: int = 16) -> PlanFile:
    name, config = read_config(model)
    return PlanFile(
        name=name, config=config, cluster=Cluster.parse(f"{devices}xh100-sxm"), layout=layout,
        workload=Workload(global_batch_size=64, seq_len=4096),
    )  # fmt: skip


SHARDED = plan(Layout(dp_shard=8, dp_replicate=2, zero=3, recompute="full", micro_batch_size=2))
MODEL_PARALLEL = plan(
    Layout(dp_shard=2, tp=2, pp=4, zero=1, sequence_parallel=True, schedule="interleaved_1f1b", virtual_stages=2)
)


def test_deepspeed_batch_triple_agrees() -> None:
    made = json.loads(export(SHARDED, "deepspeed").files["ds_config.json"])
    assert made["train_batch_size"] == (
        made["train_micro_batch_size_per_gpu"] * made["gradient_accumulation_steps"] * SHARDED.cluster.num_devices
    )
    assert made["zero_optimization"]["stage"] == 3


def test_torchtitan_degrees_multiply_to_the_devices() -> None:
    made = tomllib.loads(export(SHARDED, "torchtitan").files["torchtitan.toml"])
    p = made["parallelism"]
    assert (p["data_parallel_replicate_degree"], p["data_parallel_shard_degree"]) == (2, 8)
    assert made["activation_checkpoint"]["mode"] == "full"


def test_torchtitan_pipeline_batch_holds_every_micro_batch() -> None:
    piped = plan(Layout(dp_shard=4, pp=4, zero=2))
    made = tomllib.loads(export(piped, "torchtitan").files["torchtitan.toml"])
    assert made["training"]["local_batch_size"] == 16
    assert made["parallelism"]["pipeline_parallel_microbatch_size"] == 1


def test_megatron_options() -> None:
    text = export(MODEL_PARALLEL, "megatron").files["megatron.args"]
    for line in (
        "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 4", "--use-distributed-optimizer",
        "--num-virtual-stages-per-pipeline-rank 2", "--sequence-parallel", "--num-query-groups 8",
        "--global-batch-size 64", "--ffn-hidden-size 14336", "--untie-embeddings-and-output-weights",
    ):  # fmt: skip
        assert line in text.splitlines()


@pytest.mark.parametrize(
    ("target", "made", "field"),
    [
        ("deepspeed", MODEL_PARALLEL, "layout.tp"),
        ("accelerate-fsdp", MODEL_PARALLEL, "layout.pp"),
        ("megatron", SHARDED, "layout.zero"),
        ("torchtitan", MODEL_PARALLEL, "layout.zero"),
        ("torchtitan", plan(Layout(dp_shard=16, zero=3), model="gpt2"), "model.model_type"),
        ("composer", SHARDED, "--to"),
    ],
)
def test_refusals_name_what_the_target_cannot_run(target: str, made: PlanFile, field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        export(made, target)


@pytest.mark.parametrize("devices", [8, 16])
@pytest.mark.parametrize("target", list(TARGETS))
def test_launch_scripts_are_bash(target: str, devices: int, tmp_path: Path) -> None:
    zero = 1 if target == "megatron" else 3
    script = export(plan(Layout(dp_shard=devices, zero=zero), devices=devices), target).files["launch.sh"]
    (tmp_path / "launch.sh").write_text(script)
    assert subprocess.run(["bash", "-n", str(tmp_path / "launch.sh")], check=False).returncode == 0
    assert ("#SBATCH --nodes=2" in script) == (devices == 16)


def test_accelerate_reads_its_file(tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    path = tmp_path / "accelerate.yaml"
    path.write_text(export(SHARDED, "accelerate-fsdp").files["accelerate.yaml"])
    read = config_args.load_config_from_file(str(path))
    assert read.num_processes == 16
    assert read.mixed_precision == "bf16"
    assert read.fsdp_config["fsdp_version"] == 2
    assert read.parallelism_config["parallelism_config_dp_shard_size"] == 8


def test_deepspeed_reads_its_file() -> None:
    runtime = pytest.importorskip("deepspeed.runtime.config")
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    one = plan(Layout(zero=0, micro_batch_size=2), devices=1)  # the parser divides by the ranks that are running
    read = runtime.DeepSpeedConfig(json.loads(export(one, "deepspeed").files["ds_config.json"]))
    assert read.gradient_accumulation_steps == 32
    many = json.loads(export(SHARDED, "deepspeed").files["ds_config.json"])
    assert zero.DeepSpeedZeroConfig(**many["zero_optimization"]).stage == 3


def test_torchtitan_reads_its_toml(tmp_path: Path) -> None:
    job = pytest.importorskip("torchtitan.config.job_config")
    manager = pytest.importorskip("torchtitan.config.manager")
    path = tmp_path / "torchtitan.toml"
    path.write_text(export(SHARDED, "torchtitan").files["torchtitan.toml"])
    read = manager.ConfigManager(job.JobConfig).parse_args(["--job.config_file", str(path)])
    assert read.parallelism.data_parallel_shard_degree == 8
    assert read.activation_checkpoint.mode == "full"


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_torchtitan_reads_its_arguments(recompute: str) -> None:
    pytest.importorskip("torchtitan.config.configurable")
    manager = pytest.importorskip("torchtitan.config.manager")
    made = replace(SHARDED, layout=replace(SHARDED.layout, recompute=recompute))
    lines = export(made, "torchtitan").files["torchtitan.args"].replace("FILL_IN", "llama3_8b").split()
    read = manager.ConfigManager().parse_args(lines)
    assert read.parallelism.data_parallel_replicate_degree == 2
    assert read.training.local_batch_size == 2
