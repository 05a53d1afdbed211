"""What people ran into with half precision and checkpointing, and what the audit tells them."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from loadmaster.errors import InvalidInput  # noqa: E402
from loadmaster.runtime.audit import Audit, Finding, audit  # noqa: E402
from loadmaster.runtime.extremes import Exponents  # noqa: E402


def body(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def finding(found: Audit, code: str) -> Finding:
    return next(f for f in found.findings if f.code == code)


def codes(found: Audit) -> set[str]:
    return {f.code for f in found.findings}


X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def test_case_2_1_an_activation_above_the_fp16_range_is_no_loss_scale_problem() -> None:
    module = nn.Sequential(nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        module[0].weight.fill_(66246.39)
    found = audit(module, [torch.ones(1, 1)], precision="fp16-mixed", lr=1e-9)
    told = finding(found, "activation_overflow")
    assert told.severity == "error"
    assert told.where == ("0",)
    assert "no loss-scale problem" in told.message
    assert "bf16" in told.way_out
    assert round(told.figures["largest"], 2) == pytest.approx(66246.39, abs=0.01)
    assert found.recommendation.startswith("bf16")
    assert not found.ok


def test_case_2_2_what_torch_does_and_what_the_audit_says() -> None:
    out = {}
    for dtype, eps in ((torch.float16, 1e-8), (torch.float16, 1e-4), (torch.bfloat16, 1e-8)):
        p = nn.Parameter(torch.full((4,), 0.5, dtype=dtype))
        optimizer = torch.optim.Adam([p], lr=1e-3, eps=eps, foreach=False)
        p.grad = torch.tensor([0.0, 1e-4, 1e-2, 1.0], dtype=dtype)
        optimizer.step()
        out[f"{dtype}/{eps:g}".replace("torch.", "")] = [str(x) for x in p.data.float().tolist()]
    assert out == {
        "float16/1e-08": ["nan", "-inf", "0.4990234375", "0.4990234375"],
        "float16/0.0001": ["0.5", "0.4990234375", "0.4990234375", "0.4990234375"],
        "bfloat16/1e-08": ["0.5", "0.498046875", "0.498046875", "0.498046875"],
    }
    half = body().half()
    optimizer = torch.optim.Adam(half.parameters(), lr=0.0, eps=1e-8)
    told = finding(audit(half, [X.half()], optimizer=optimizer, steps=1), "epsilon_underflow")
    assert told.severity == "error"
    assert "fp32 master weights and moments" in told.way_out
    assert "epsilon_underflow" not in codes(audit(body(), [X], precision="fp16-mixed"))


def test_case_2_3_skips_at_the_start_are_benign_and_counted() -> None:
    module = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(1.0)

    def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return 0.75 * m(x).sum()

    found = audit(module, [torch.ones(1, 1)], precision="fp16-mixed", loss=loss, init_scale=2.0**32, lr=1e-6, steps=1)
    told = finding(found, "skipped_steps")
    assert (told.figures["skips"], told.figures["scale"]) == (16, 65536)
    assert told.severity == "note"
    assert "start at 65536" in told.way_out


def test_case_2_5_updates_that_bf16_weights_cannot_hold() -> None:
    lr, decay = 6e-4, 0.01
    b, f = torch.ones(1, dtype=torch.bfloat16), torch.ones(1)
    for _ in range(100):
        b -= lr
        f -= lr
    w = torch.full((1,), 0.5, dtype=torch.bfloat16)
    for _ in range(1000):
        w.mul_(1 - 1e-4 * decay)
    assert (b.item(), round(f.item(), 6), w.item()) == (1.0, 0.940002, 0.5)
    module = nn.Linear(16, 16)
    with torch.no_grad():
        module.weight.fill_(1.0)
    found = audit(module, [X], precision="bf16", lr=lr, weight_decay=0.0, steps=1)
    told = finding(found, "lost_updates")
    assert told.severity == "error"
    assert told.figures["share"] > 0.9
    assert "fp32 master weights" in told.way_out
    kept = audit(body(), [X], precision="bf16-mixed", lr=lr, steps=1)
    assert kept.ok


def test_unscaled_fp16_gradients_that_vanish_are_counted() -> None:
    from loadmaster.describe.precision import Precision

    def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return 1e-9 * m(x).square().mean()

    plain = Precision(compute="fp16")
    found = audit(body(), [X], precision=plain, loss=loss, steps=1)
    told = finding(found, "gradient_underflow")
    assert told.figures["lost_unscaled"] > 0.9 > 0.1 > told.figures["lost_at_scale"]


class Dropping(nn.Module):
    """A checkpointed layer with dropout."""

    def __init__(self, preserve: bool, reentrant: bool = False) -> None:
        super().__init__()
        self.inner, self.preserve, self.reentrant = nn.Linear(16, 16), preserve, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(  # type: ignore[no-any-return]
            lambda t: F.dropout(self.inner(t).relu(), 0.1, training=True), x, use_reentrant=self.reentrant,
            preserve_rng_state=self.preserve,
        )  # fmt: skip


def test_case_5_2_recomputing_with_other_masks() -> None:
    torch.manual_seed(0)
    lin, x = nn.Linear(64, 64), torch.randn(512, 64, requires_grad=True)

    def f(t: torch.Tensor) -> torch.Tensor:
        return F.dropout(lin(t).relu(), 0.1, training=True)

    def grad(keep: bool | None) -> torch.Tensor:
        torch.manual_seed(1)
        lin.zero_grad()
        x.grad = None
        y = f(x) if keep is None else checkpoint(f, x, use_reentrant=False, preserve_rng_state=keep)
        torch.manual_seed(123)
        y.square().mean().backward()
        assert lin.weight.grad is not None
        return lin.weight.grad.clone()

    plain, kept, lost = grad(None), grad(True), grad(False)
    assert (plain - kept).abs().max().item() == 0.0
    assert ((plain - lost).norm() / plain.norm()).item() > 0.05
    told = finding(audit(Dropping(preserve=False), [X]), "random_state_not_kept")
    assert told.severity == "error"
    assert "random_state_not_kept" not in codes(audit(Dropping(preserve=True), [X]))


def test_case_5_3_frozen_inputs_and_the_reentrant_checkpoint() -> None:
    class Frozen(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.emb, self.reentrant = nn.Embedding(10, 4), reentrant
            self.emb.weight.requires_grad_(False)
            self.body, self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), nn.Linear(2, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            out = checkpoint(self.body, self.emb(ids), use_reentrant=self.reentrant)
            return self.head(out)  # type: ignore[no-any-return]

    found = audit(Frozen(reentrant=True), [torch.arange(3)])
    assert finding(found, "no_gradient").where == ("body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias")
    assert "reentrant_checkpoint_cut_off" in codes(found)
    assert not found.ok
    assert audit(Frozen(reentrant=False), [torch.arange(3)]).ok


def test_case_5_1_checkpointing_each_linear_layer_saves_nothing() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))
    own = {p.untyped_storage().data_ptr() for p in layers.parameters()}

    def held(fn: object, x: torch.Tensor) -> int:
        seen: dict[int, int] = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            if t.untyped_storage().data_ptr() not in own:
                seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            fn(x)  # type: ignore[operator]
        return sum(seen.values())

    def run(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    x = torch.randn(137, 256, requires_grad=True)
    assert held(run, x) == 1122304 == 8 * x.nbytes
    assert held(lambda t: checkpoint(run, t, use_reentrant=False), x) == 140288


def test_layers_that_depend_on_the_micro_batch_are_named() -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    assert finding(audit(module, [X]), "batch_dependent").where == ("1",)


def test_positions_in_half_precision_are_named() -> None:
    module = body()
    module.register_buffer("rotary_inv_freq", torch.ones(4, dtype=torch.bfloat16))
    told = finding(audit(module, [X]), "positions_in_half_precision")
    assert told.severity == "error"


def test_exponents_count_what_torch_loses() -> None:
    x = torch.randn(20000, generator=torch.Generator().manual_seed(0)) * 1e-6
    seen = Exponents()
    seen.add(x)
    for scale in (1.0, 16.0, 2.0**16):
        lost = ((x * scale).half() == 0).float().mean().item()
        from loadmaster.describe.dtype import DType

        assert seen.share_lost(DType.named("fp16"), scale=scale) == pytest.approx(lost, abs=1e-3)


def test_refusals() -> None:
    with pytest.raises(InvalidInput, match="batches = none: are needed"):
        audit(body(), [])
    with pytest.raises(InvalidInput, match="steps = 0: must be at least 1"):
        audit(body(), [X], steps=0)
    with pytest.raises(InvalidInput, match="loss = nan: is not finite in fp32 at step 0"):
        audit(body(), [X * float("nan")])


def test_the_command_on_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from loadmaster.cli.main import main
    from loadmaster.describe.cluster import Cluster
    from loadmaster.describe.layout import Layout
    from loadmaster.describe.plan_file import PlanFile
    from loadmaster.describe.workload import Workload

    config = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    plan = PlanFile(
        name="tiny", cluster=Cluster.parse("8xh100-sxm"), workload=Workload(global_batch_size=8, seq_len=64),
        layout=Layout(dp_shard=8, precision="bf16"), config=config,
    )  # fmt: skip
    plan.save(tmp_path / "plan.toml")
    text = tmp_path / "text.txt"
    text.write_text("a loadmaster plans what an aircraft carries and where it sits. " * 200)
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(tmp_path / "plan.toml"), "--json", "--layers", "1", "--data", str(text)])
    found = json.loads(capsys.readouterr().out)
    assert found["precision"] == "bf16"
    assert len(found["measured"]["losses"]) == 3
    assert ended.value.code == (0 if found["ok"] else 1)
    assert set(found["measured"]["formats"]) == {"fp16", "bf16"}
    with pytest.raises(SystemExit):
        main(["audit", str(tmp_path / "plan.toml"), "--layers", "1", "--precision", "fp16-mixed"])
    shown = capsys.readouterr().out
    assert "loss scale that fits" in shown
    assert "fp32 master weights" in shown
    for bad, message in ((["--layers", "0"], "--layers = 0: must be"), (["--precision", "fp7"], "fp7: is no known")):
        with pytest.raises(SystemExit) as ended:
            main(["audit", str(tmp_path / "plan.toml"), *bad])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


def test_the_command_on_a_factory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from loadmaster.cli.main import main

    (tmp_path / "halves.py").write_text(
        "import torch\n"
        "def half():\n"
        "    module = torch.nn.Linear(4, 4).half()\n"
        "    optimizer = torch.optim.Adam(module.parameters(), lr=0.0, eps=1e-8)\n"
        "    return module, torch.ones(2, 4).half(), optimizer\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["audit", "halves:half", "--json", "--precision", "fp16-mixed", "--init-scale", "1e9"])
    assert ended.value.code == 1
    found = json.loads(capsys.readouterr().out)
    assert found["findings"][0]["code"] == "epsilon_underflow"
    assert "skipped_steps" in {f["code"] for f in found["findings"]}
