"""`loadmaster measure`: the cluster file is one that plan reads, and bad input is refused before any work."""

import json
from pathlib import Path

import numpy as np
import pytest

import loadmaster as lm
from loadmaster.cli.main import main
from loadmaster.probe.fit import Sample, fit_link
from loadmaster.probe.measure import Effort, measure_in_full

TINY = Effort(dtypes=("fp32",), matrix_sizes=(64,), matrix_seconds=0.02, copy_bytes=1 << 20,
              message_sizes=(4096, 65536, 1 << 20), repeats=5)  # fmt: skip


@pytest.mark.ranks
def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    found = measure_in_full(ranks=2, memory_cap=1 << 28, device="cpu", effort=TINY)
    found.save(tmp_path / "here.toml")
    cluster = lm.Cluster.load(tmp_path / "here.toml")
    assert cluster == found.cluster
    assert (cluster.num_devices, cluster.memory_bytes) == (2, 1 << 28)
    assert cluster.device.measured
    assert (cluster.device.peak("fp32") or 0) > 1e8
    assert cluster.intra_node.bandwidth > 1e6
    assert cluster.intra_node.latency > 0
    assert set(found.operations["intra_node"]) == {"hop", "all_reduce", "reduce_scatter", "all_gather"}


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
def test_the_line_is_found_through_noise(noise: float) -> None:
    chance = np.random.default_rng(0)
    sizes = [4096 << 2 * i for i in range(8)]
    times = [(50e-6 + n / 2e9) * (1 + noise * chance.uniform(-1, 1)) for n in sizes]
    samples = [Sample(wire_bytes=n, median=t, spread=0.0, repeats=1) for n, t in zip(sizes, times, strict=True)]
    line = fit_link(samples)
    assert line.latency == pytest.approx(50e-6, rel=noise + 1e-9)
    assert line.bandwidth == pytest.approx(2e9, rel=noise + 1e-9)


def test_a_latency_too_small_to_see_stays_positive() -> None:
    samples = [
        Sample(wire_bytes=n, median=n / 1e9 * (1 + n / 1e7), spread=0.0, repeats=1) for n in (10**4, 10**6, 10**7)
    ]
    line = fit_link(samples)
    assert line.latency > 0
    assert line.bandwidth > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ranks", "0"], "--ranks = 0"),
        (["--ranks", "100000"], "use fewer"),
        (["--memory-cap", "much"], "--memory-cap"),
        (["--device", "tpu"], "use cpu, cuda or auto"),
        (["-o", "/nowhere/here.toml"], "/nowhere is no folder"),
    ],
)
def test_bad_input_is_one_message(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["measure", "--json", *args])
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert message in said.err
    assert said.err.count("\n") == 1
    assert not said.out
    assert not list(tmp_path.iterdir())


def test_json(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadmaster.probe.measure.QUICK", TINY)
    with pytest.raises(SystemExit) as ended:
        main(["measure", "--json", "--ranks", "1", "-o", str(tmp_path / "a.toml")])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["device"]["measured"] is True
    assert lm.Cluster.load(tmp_path / "a.toml").num_devices == 1
