"""`loadmaster train` as a user runs it: killed, interrupted, restarted, and given what it must refuse."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from forked import write_inputs

import loadmaster as lm
from loadmaster.cli.main import main
from loadmaster.describe.plan_file import PlanFile

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
TRAIN = ["-m", "loadmaster", "train", "plan.toml", "--data", "text.txt", "--no-tensorboard", "--threads", "1"]


ALONE = "dp_shard=1,zero=0"  # one rank instead of the plan's two


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_inputs(tmp_path)
    link = lm.Link(latency=1e-4, bandwidth=1e9)
    device = lm.Device(name="cpu", memory_bytes=1 << 30, memory_bandwidth=1e10)
    cluster = lm.Cluster(device=device, devices_per_node=2, num_nodes=1, intra_node=link, inter_node=link)
    PlanFile(
        name="tiny", factory="tiny_model:make", cluster=cluster,
        workload=lm.Workload(global_batch_size=4, seq_len=16), layout=lm.Layout(dp_shard=2, zero=2, precision="fp32"),
    ).save(tmp_path / "plan.toml")  # fmt: skip
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(folder: Path, *args: str, program: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, *(program or ()), *TRAIN, *args]
    return subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_step(folder: Path, step: int, running: subprocess.Popen[str]) -> None:
    """Until metrics.jsonl and a checkpoint tell that the run is under way."""
    metrics, deadline = folder / "run" / "metrics.jsonl", time.monotonic() + 120
    while not metrics.is_file() or metrics.read_text().count("\n") < step:
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ranks_of(running: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    children = psutil.Process(running.pid).children(recursive=True)
    return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}


@pytest.mark.ranks
def test_a_killed_rank_ends_the_run_with_its_name_and_the_run_goes_on(folder: Path) -> None:
    running = start(folder, "--out", "run", "--steps", "100000", "--save-every", "5")
    wait_for_step(folder, 8, running)
    ranks = ranks_of(running)
    ranks[1].kill()
    said, errors = running.communicate(timeout=60)
    message = [line for line in errors.splitlines() if line.startswith("loadmaster:")]
    assert running.returncode == 1
    assert len(message) == 1
    assert "rank 1 of 2" in message[0]
    assert "SIGKILL" in message[0]
    assert "--resume" in message[0]
    assert "Traceback" not in errors + said
    assert not ranks[0].is_running()

    before = len((folder / "run" / "metrics.jsonl").read_text().splitlines())
    again = start(folder, "--out", "run", "--steps", str(before + 20), "--resume", "--json", "--layout", ALONE)
    said, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    steps = [json.loads(line)["step"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, before + 21))
    assert json.loads(said)["run"]["step"] == before + 20


@pytest.mark.ranks
def test_ctrl_c_saves_and_ends(folder: Path) -> None:
    running = start(folder, "--out", "run", "--steps", "100000", "--layout", ALONE)
    wait_for_step(folder, 3, running)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "stopped after step" in errors
    assert "Traceback" not in errors
    metrics = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert (folder / "run" / "checkpoints" / "latest").read_text().strip() == f"step-{len(metrics):08d}"


@pytest.mark.ranks
def test_torchrun_restarts_and_the_run_resumes_itself(folder: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2")
    running = start(folder, "--out", "run", "--steps", "150", "--save-every", "20", program=torchrun)
    wait_for_step(folder, 30, running)
    ranks_of(running)[1].kill()
    _, errors = running.communicate(timeout=120)
    assert running.returncode == 0, errors[-3000:]
    assert "resumed from" in errors
    steps = [json.loads(line)["step"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 151))


def refuse(args: list[str], capsys: pytest.CaptureFixture[str], *, status: int = 2) -> str:
    with pytest.raises(SystemExit) as ended:
        main(args)
    said = capsys.readouterr()
    assert ended.value.code == status
    assert said.err.startswith("loadmaster: ")
    assert said.err.count("\n") == 1
    assert not said.out
    return said.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": "nowhere.toml"}, "cannot be read"),
        ({"plan": "garbled.toml"}, "cannot be read"),
        ({"--data": "empty"}, "holds no text"),
        ({"--data": "nowhere"}, "is no file or folder"),
        ({"--out": "text.txt"}, "is a file"),
        ({"--steps": "0"}, "must be at least 1"),
        ({"--lr": "-1"}, "must be above 0"),
        ({"--schedule": "triangle"}, "is not known"),
        ({"--keep": "0"}, "must be at least 1"),
        ({"--resume": None}, "there is no checkpoint to go on from"),
        ({"--resume-from": "empty"}, "holds no checkpoint"),
        ({"--layout": "dp_shard=0"}, "must be a whole number"),
        ({"--layout": "degrees=2"}, "is not a field of a layout"),
        ({"--layout": "tp=2,dp_shard=1"}, "not run by this runtime"),
        ({"--tokenizer": "nowhere.json"}, "does not exist"),
        ({"--device": "abacus"}, "use cpu, cuda or auto"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], change: dict[str, str | None], message: str
) -> None:
    (folder / "empty").mkdir()
    (folder / "garbled.toml").write_text("a plan [ this is not")
    before = sorted(folder.rglob("*"))
    given = {"plan": "plan.toml", "--data": "text.txt", "--out": "run"} | change
    args = [word for name, value in given.items() if name != "plan" for word in (name, value) if word is not None]
    assert message in refuse(["train", str(given["plan"]), *args], capsys)
    assert sorted(folder.rglob("*")) == before


def test_another_world_size_under_torchrun(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "WORLD_SIZE = 3" in refuse(["train", "plan.toml", "--data", "text.txt"], capsys)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(SystemExit) as ended:
        main(["train", "plan.toml", "--data", "text.txt"])
    assert ended.value.code == 2
    assert not capsys.readouterr().err  # rank 0 says it once


@pytest.mark.parametrize("text", [None, "{", "[]", '{"measured": 3}', '{"measured": {"memory": {}}}'])
def test_compare_refuses_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None) -> None:
    if text is not None:
        (tmp_path / "ledger.json").write_text(text)
    refuse(["compare", str(tmp_path)], capsys)


@pytest.mark.ranks
def test_an_error_in_the_model_is_told_once_with_its_rank_and_kept(folder: Path) -> None:
    model = (folder / "tiny_model.py").read_text()
    broken = "        if self.training and os.environ['RANK'] == '1': raise RuntimeError('the model broke')\n"
    (folder / "tiny_model.py").write_text(model.replace("        x = self.embed", broken + "        x = self.embed"))
    running = start(folder, "--out", "run", "--steps", "9")
    _, errors = running.communicate(timeout=120)
    assert running.returncode == 1
    message = [line for line in errors.splitlines() if line.startswith("loadmaster:")]
    assert len(message) == 1
    assert "rank 1 failed at step 0, stage 0, forward of micro-batch 0: RuntimeError: the model broke" in message[0]
    assert "Traceback" not in errors
    kept = list((folder / "run" / "logs").glob("*.traceback"))
    assert len(kept) == 1
    assert "tiny_model.py" in kept[0].read_text()
