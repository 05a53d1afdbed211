"""``loadmaster trace``: what it prints and writes, and how it refuses."""

import json
import pickle
import re

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

from loadmaster.cli.main import _run
from loadmaster.trace.api import trace
from loadmaster.trace.snapshot import snapshot

MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, branch=False):
        super().__init__()
        self.layers, self.branch = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)), branch
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
            if self.branch and x.sum() > 0:
                x = -x
        return x

def build():
    return Net(), torch.zeros(8, 64)

def branching():
    return Net(branch=True), torch.zeros(8, 64)

number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "traced_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_json_html_and_snapshot_of_a_factory(folder, capsys):
    assert (
        _run("trace", ["traced_module:build", "--dtype", "fp32", "--json", "--html", "o.html", "--snapshot", "s.pkl"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    parameters = 3 * 65 * 64 * 4
    assert found["predicted"]["memory"]["terms"]["parameters"] == parameters
    assert found["peak"]["phase"] == "optimizer"
    assert sum(found["predicted"]["memory"]["terms"].values()) == found["peak"]["bytes"]
    assert found["allocator"]["reserved_peak"] % (2 << 20) == 0
    page = (folder / "o.html").read_text()
    assert not re.search(r"(src|href)=|https?://(?!www.w3.org)|import ", page)  # self-contained
    figures = json.loads(re.search(r'application/json">(.*?)</script>', page, re.DOTALL)[1])
    assert figures["peak"]["bytes"] == found["peak"]["bytes"]
    assert max(map(sum, zip(*figures["bytes"], strict=True))) == found["peak"]["bytes"]
    assert pickle.loads((folder / "s.pkl").read_bytes())["segments"]


def test_terminal_names_the_peak(folder, capsys):
    assert _run("trace", ["traced_module:build", "--recompute", "full", "--capacity", "1GiB"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "in optimizer of the root module (aten._foreach_sqrt)" in shown
    assert "fits 1.00 GiB" in shown
    assert "optimizer/temporaries" in shown


def test_too_small_a_capacity_is_a_no(folder, capsys):
    assert _run("trace", ["traced_module:build", "--capacity", "2MiB", "--batch", "1"]) in (0, 1)
    assert _run("trace", ["openai-community/gpt2", "--seq", "64", "--capacity", "1GiB", "--dtype", "fp32"]) == 1
    assert "does not fit 1.00 GiB" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["traced_module:branching"], r"module \(root\), op aten\._local_scalar_dense\S*: its result depends"),
        (["traced_module:missing"], "cannot be found"), (["no_such_module:build"], "cannot be found"),
        (["traced_module:number"], "cannot be called"), (["no-such-model"], "is no model known by name"),
        (["traced_module:build", "--dtype", "int7"], "precision = int7"),
        (["traced_module:build", "--optimizer", "lamb"], "optimizer = lamb"),
        (["traced_module:build", "--html", "missing/o.html"], "is no folder"),
        (["traced_module:build", "--layout", "cp=2"], "is not traced"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_status_2(folder, capsys, args, message):
    assert _run("trace", args) == 2
    shown = capsys.readouterr().err
    assert re.search(message, shown)
    assert "Traceback" not in shown


def test_pytorchs_own_reader_understands_the_snapshot():
    step = trace(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4)), torch.zeros(64, 512))
    data = snapshot(step)
    text = _memory_viz.trace(data)
    assert text.count("cudaMalloc") == len(data["segments"]) > 1
    assert "unknown" not in text
    assert _memory_viz.segsum(data)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(data)
    live = peak = 0
    for entry in data["device_traces"][0]:
        live += {"alloc": entry["size"], "free_completed": -entry["size"]}.get(entry["action"], 0)
        peak = max(peak, live)
    assert peak == int(step.live_bytes.max())
    for segment in data["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
