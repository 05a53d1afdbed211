"""The C and the Triton kernel against the PyTorch reference: the same step from the same state."""

import copy
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loadmaster.errors import InvalidInput
from loadmaster.program.codebook import FIRST_MOMENT, SECOND_MOMENT
from loadmaster.runtime import optim
from loadmaster.runtime.optim import native
from loadmaster.runtime.optim.codes import decode, encode, turn_of

SHAPES = ((8, 520), (300,))
RULES = [optim.AdamW, optim.Adam, optim.SGD, optim.Lion, optim.Adagrad]
KERNELS = [
    pytest.param("native", marks=pytest.mark.skipif(not native.available(), reason="no C compiler here")),
    pytest.param("triton", marks=pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton here")),
]


def make(cls, weights, kernel, **options):
    params = [torch.nn.Parameter(w.clone()) for w in weights]
    return params, cls([(f"p{i}", p) for i, p in enumerate(params)], kernel=kernel, **options)


def step(params, optimizer, gradients) -> None:
    for p, g in zip(params, gradients, strict=True):
        p.grad = g.clone()
    optimizer.step()


def gradients(dtype, seed: int):
    generator = torch.Generator().manual_seed(seed)
    scale = [10 ** (4 * torch.rand(s, generator=generator) - 4) for s in SHAPES]
    return [(torch.randn(s, generator=generator) * e).to(dtype) for s, e in zip(SHAPES, scale, strict=True)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("cls", RULES, ids=lambda c: c.__name__)
@pytest.mark.parametrize(("bits", "dtype"), [(8, torch.float32), (8, torch.bfloat16), (32, torch.float32)])
def test_one_step_agrees_with_the_reference(cls, bits, dtype, kernel, monkeypatch) -> None:
    if kernel == "triton":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    options = {"state_bits": bits, "stochastic_rounding": dtype is torch.bfloat16, "weight_decay": 0.1}
    weights = [torch.randn(s).to(dtype) for s in SHAPES]
    params, reference = make(cls, weights, "reference", **options)
    for seed in range(4):
        step(params, reference, gradients(dtype, seed))
    other, fused = make(cls, params, kernel, **options)
    fused.load_state_dict(copy.deepcopy(reference.state_dict()))
    step(params, reference, gradients(dtype, 9))
    step(other, fused, gradients(dtype, 9))
    for p, q in zip(params, other, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6 if dtype is torch.float32 else 2**-7)
        for name, mine in reference.state[p].items():
            theirs = fused.state[q][name]
            if mine.dtype in (torch.int8, torch.uint8):
                apart = (mine.int() - theirs.int()).abs()
                assert apart.max() <= 1  # where a tie falls on the other side
                assert (apart > 0).float().mean() < 2e-3
            else:
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_block_sizes(kernel, monkeypatch) -> None:
    if kernel == "triton":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    for block in (64, 4096):
        weights = [torch.randn(s) for s in SHAPES]
        results = []
        for which in ("reference", kernel):
            params, optimizer = make(optim.AdamW, weights, which, state_bits=8, block=block)
            step(params, optimizer, gradients(torch.float32, 3))
            results.append(params)
        for p, q in zip(*results, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kernel", ["reference", *KERNELS])
def test_a_nan_gradient_is_loud_and_stays_in_its_block(kernel, monkeypatch) -> None:
    if kernel == "triton":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    p = torch.nn.Parameter(torch.zeros(1024))
    optimizer = optim.AdamW([("p", p)], state_bits=8, kernel=kernel, min_elements=1)
    for _ in range(2):
        p.grad = torch.ones(1024)
        p.grad[300] = float("nan")
        optimizer.step()
    assert p[256:512].isnan().all()
    assert p[:256].isfinite().all()
    assert p[512:].isfinite().all()


def test_stochastic_codes_are_right_in_the_mean() -> None:
    """A value between two codes: rounding to nearest is off the same way always, ours is not."""
    block, target = 256, 0.1003
    x = torch.full((block * 400,), target)
    x[::block] = 1.0
    for code in (FIRST_MOMENT, SECOND_MOMENT):
        nearest, scales = encode(x, code, block)
        codes, _ = encode(x, code, block, old=nearest, turns=turn_of(1, 0, 400))
        inside = torch.arange(x.numel()) % block != 0
        means = [decode(c, scales, code, block)[inside].mean().item() for c in (nearest, codes)]
        assert abs(means[1] - target) < abs(means[0] - target) / 5
        assert (codes.int() - nearest.int()).abs().max() <= 1


@pytest.mark.skipif(not native.available() or platform.machine() != "x86_64", reason="no x86 compiler here")
def test_the_portable_build_agrees_too(monkeypatch) -> None:
    """Without AVX-512 the same C is left to the compiler's own vectors."""
    monkeypatch.setattr(native, "FLAGS", tuple(f.replace("=native", "=x86-64-v2") for f in native.FLAGS))
    native._library.cache_clear()
    try:
        assert "portable" in native.name()
        for cls in (optim.AdamW, optim.Lion, optim.Adagrad):
            test_one_step_agrees_with_the_reference(cls, 8, torch.float32, "native", monkeypatch)
    finally:
        native._library.cache_clear()


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton here")
@pytest.mark.parametrize("options", [["all"], ["bf16", "captured"]], ids=" ".join)
def test_the_triton_kernel_compiles_for_cuda(options) -> None:
    """Without a GPU: the interpreter takes what the compiler refuses, so running there is not enough."""
    program = Path(__file__).parents[2] / "programs" / "compile_triton.py"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, program, *options], env=env, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_which_kernel_runs_can_be_asked() -> None:
    assert optim.kernel_name("reference") == "reference (PyTorch)"
    assert optim.kernel_name().startswith(("C (", "reference"))
    with pytest.raises(InvalidInput, match="use one of auto"):
        optim.kernel_name("cuda")


def test_without_a_compiler_the_reference_runs(monkeypatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    p = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = optim.AdamW([("p", p)], state_bits=8)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert "reference" in optimizer.describe()
    torch.testing.assert_close(p, torch.full_like(p, -1e-3))
