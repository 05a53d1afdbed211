"""The fused CPU kernel: C built by the machine's compiler at first use, kept in the user's cache, called by ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from loadmaster.program.codebook import num_blocks
from loadmaster.runtime.optim.work import Work

__all__ = ["available", "name", "step", "supports"]

SOURCE = Path(__file__).parent / "kernels" / "blockwise.c"
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
WIDE = ("-mprefer-vector-width=512",)
BLOCKS_A_TURN = 128  # as in the C source
PARAM_BF16, GRAD_BF16, STOCHASTIC, STATE_32, NESTEROV = 1, 2, 4, 8, 16
_log = logging.getLogger(__name__)


def available() -> bool:
    """Whether the kernel could be built and loaded here."""
    return _library() is not None


def name() -> str:
    """What runs, for people."""
    library = _library()
    assert library is not None
    wide = "AVX-512" if library.loadmaster_lanes() > 1 else "portable"
    return f"C ({wide}, {torch.get_num_threads()} threads)"


def supports(work: Work) -> bool:
    """fp32 and bf16 on the CPU."""
    allowed = (torch.float32, torch.bfloat16)
    return work.param.device.type == "cpu" and work.param.dtype in allowed and work.grad.dtype in allowed


def step(works: Sequence[Work]) -> None:
    """One step of every tensor in one call; all of one rule and block."""
    if not works:
        return
    library = _library()
    assert library is not None
    rule, block = works[0].rule, works[0].block
    tensors = np.array([_row(w) for w in works], dtype=np.int64)
    scalars = np.array([w.scalars.row() for w in works], dtype=np.float32)
    turns = np.zeros(len(works) + 1, dtype=np.int64)
    np.cumsum([-(-num_blocks(w.param.numel(), block) // BLOCKS_A_TURN) for w in works], out=turns[1:])
    library.loadmaster_step(
        ctypes.c_int(rule), ctypes.c_int64(len(works)), ctypes.c_void_p(tensors.ctypes.data),
        ctypes.c_void_p(scalars.ctypes.data), ctypes.c_void_p(turns.ctypes.data), ctypes.c_int64(block),
        ctypes.c_int64(torch.get_num_threads()),
    )  # fmt: skip


def _row(work: Work) -> list[int]:
    """The C struct Tensor: made once, then with the step's gradient and key."""
    if work.row is None:
        work.row = _new_row(work)
    row = work.row
    row[1], row[9] = work.grad.data_ptr(), work.key
    row[8] = (row[8] & ~GRAD_BF16) | GRAD_BF16 * (work.grad.dtype is torch.bfloat16)
    return row


def _new_row(work: Work) -> list[int]:
    """A rule with one moment leaves the other's place empty."""
    first = second = first_scale = second_scale = 0
    for moment in work.moments:
        scales = 0 if moment.scales is None else moment.scales.data_ptr()
        if work.rule == 3 or (work.rule == 0 and moment is work.moments[1]):
            second, second_scale = moment.data.data_ptr(), scales
        else:
            first, first_scale = moment.data.data_ptr(), scales
    flags = (
        PARAM_BF16 * (work.param.dtype is torch.bfloat16)
        | STOCHASTIC * work.stochastic
        | STATE_32 * (work.moments[0].scales is None)
        | NESTEROV * work.nesterov
    )
    return [
        work.param.data_ptr(), 0, first, second, first_scale, second_scale,
        work.param.numel(), work.start, flags, 0,
    ]  # fmt: skip


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The kernel, built if the cache has none for this source, compiler and processor."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None or platform.system() == "Windows":
        _log.warning("no C compiler: 8-bit optimizers run the slower PyTorch reference")
        return None
    try:
        return ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        detail = getattr(error, "stderr", None) or error
        _log.warning("the C kernel could not be built; 8-bit optimizers run the slower PyTorch reference: %s", detail)
        return None


def _build(compiler: str) -> Path:
    source = SOURCE.read_bytes()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
    key = hashlib.sha256(b"\0".join((source, version, " ".join(FLAGS + WIDE).encode(), _processor()))).hexdigest()[:20]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loadmaster" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="loadmaster-"))
    target = folder / f"blockwise-{key}.so"
    if not target.exists():
        part = folder / f"{target.name}.{os.getpid()}"
        _compile(compiler, part)
        part.replace(target)  # atomic: ranks may build at the same time
    return target


def _compile(compiler: str, target: Path) -> None:
    """With 512-bit vectors where the compiler knows the flag (x86), else without."""
    for extra in (WIDE, ()):
        command = [compiler, *FLAGS, *extra, str(SOURCE), "-o", str(target), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode == 0:
            return
    done.check_returncode()


def _processor() -> bytes:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode()
    return "\n".join(sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))})).encode()
