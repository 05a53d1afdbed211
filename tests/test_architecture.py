"""The floors of the house: imports go down only, and planning imports no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "loadmaster"
FLOORS = {
    "units": 0, "errors": 0, "ledger": 0, "ranks": 0, "describe": 1, "program": 2, "laws": 3, "runtime": 3, "trace": 3,
    "probe": 3, "planner": 4, "report": 5, "export": 5, "cli": 6, "__main__": 7,
}  # fmt: skip
TORCH_ROOMS = {"trace", "probe", "runtime"}


def room(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = [p for p in sorted(SRC.rglob("*.py")) if p.name != "__init__.py" or p.parent != SRC]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_go_down(path: Path) -> None:
    here = room(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "torch":
            assert here in TORCH_ROOMS, f"{path} imports torch"
        if parts[0] != "loadmaster" or len(parts) < 2 or parts[1] not in FLOORS or parts[1] == here:
            continue
        if FLOORS[parts[1]] == FLOORS[here] == 0:  # the ground floor is one room: units and ledger raise errors
            continue
        assert FLOORS[parts[1]] < FLOORS[here], f"{path} imports {name}, which is not below it"


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys, loadmaster as lm\n"
        "m = lm.Model.from_hf('gpt2'); c = lm.Cluster.parse('8xh100-sxm')\n"
        "w = lm.Workload(global_batch_size=8, seq_len=128)\n"
        "lm.price(m, c, w, lm.Layout(dp_shard=8)); lm.plan(m, c, w)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_room_does_not_hide_the_function_of_its_name() -> None:
    code = (
        "import loadmaster as lm, loadmaster.export.api, loadmaster.trace.api\n"
        "assert callable(lm.export) and callable(lm.trace), (lm.export, lm.trace)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
