"""Which whole checkpoints a folder holds, and the one a run goes on from; no torch, so that a command asks at once."""

from __future__ import annotations

import re
from pathlib import Path

from loadmaster.errors import InvalidInput
from loadmaster.runtime.run import Run

__all__ = ["MANIFEST", "find_checkpoint", "latest_checkpoint", "list_checkpoints"]

MANIFEST = "checkpoint.json"
STEP_FOLDER = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints in a run's checkpoint folder, oldest first."""

    def order(path: Path) -> tuple[int, int]:
        match = STEP_FOLDER.fullmatch(path.name)
        assert match is not None
        return int(match[1]), int(match[2] or 0)

    if not folder.is_dir():
        return []
    found = (p for p in folder.iterdir() if STEP_FOLDER.fullmatch(p.name) and (p / MANIFEST).is_file())
    return sorted(found, key=order)


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that ``latest`` names; the newest whole one where the pointer is lost; None: there is none."""
    try:
        named = folder / (folder / "latest").read_text(encoding="utf-8").strip()
        if (named / MANIFEST).is_file() and named.parent == folder:
            return named
    except OSError:
        pass
    whole = list_checkpoints(folder)
    return whole[-1] if whole else None


def find_checkpoint(run: Run) -> Path | None:
    """The checkpoint this run goes on from; None: it starts anew.

    Raises:
        InvalidInput: one was asked for and there is none, or the folder holds another run already.
    """
    if run.resume_from is not None:
        given = Path(run.resume_from)
        found = given if (given / "checkpoint.json").is_file() else None
        for folder in (given, given / "checkpoints"):
            found = found or latest_checkpoint(folder)
        if found is None:
            raise InvalidInput("--resume-from", run.resume_from, "holds no checkpoint", "name a run's folder")
        return found
    found = latest_checkpoint(run.checkpoints)
    if run.resume == "no" and found is not None:
        raise InvalidInput("--out", run.out, f"holds a run already ({found.name})", "add --resume, or name another")
    if run.resume == "yes" and found is None:
        raise InvalidInput("--resume", run.out, "there is no checkpoint to go on from", "drop --resume to start anew")
    return found
