"""A checkpoint as a Hugging Face folder: config.json and model.safetensors that `from_pretrained` loads."""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from loadmaster.errors import InvalidInput
from loadmaster.runtime.checkpoint import Checkpoint
from loadmaster.runtime.whole import latest_checkpoint

__all__ = ["export_hf"]


def export_hf(source: Path, target: Path) -> Path:
    """Write the newest checkpoint below `source` (or `source` itself) to the folder `target`, whole or not at all.

    Weights are the masters where there are any: what the optimizer updates. Padding is none of the state.

    Raises:
        InvalidInput: no checkpoint, one of a model that is no Hugging Face config, or `target` holds files.
    """
    found = source if (source / "checkpoint.json").is_file() else None
    for folder in (source, source / "checkpoints"):
        found = found or latest_checkpoint(folder)
    if found is None:
        raise InvalidInput("export", str(source), "holds no checkpoint", "name a run's folder")
    saved = Checkpoint.open(found)
    config = saved.run.get("config")
    if config is None:
        raise InvalidInput("export", str(source), "is of a model:factory", "only a Hugging Face config can be exported")
    if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise InvalidInput("export", str(target), "holds files already", "name an empty or new folder")
    part = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    try:
        part.mkdir(parents=True)
        names = [name for kind, name in saved.shapes if kind == "param"]
        buffers = [name for kind, name in saved.shapes if kind == "buffer"]
        weights = {name: saved.whole(name, _kind(saved, name)) for name in names}
        weights |= {name: saved.whole(name, "buffer") for name in buffers}
        save_file({n: w.contiguous() for n, w in weights.items()}, str(part / "model.safetensors"), {"format": "pt"})
        dtype = str(next(iter(weights.values()), torch.empty(0)).dtype).removeprefix("torch.")
        (part / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n", encoding="utf-8")
        if target.exists():
            target.rmdir()
        part.rename(target)
    except OSError as error:
        raise InvalidInput("export", str(target), f"cannot be written ({error.strerror})", "choose another") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def _kind(saved: Checkpoint, name: str) -> str:
    return "master" if ("master", name) in saved.shapes else "param"
