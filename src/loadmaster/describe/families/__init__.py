"""Hugging Face configs to exact op tables, one file a family; `from_hf` finds the right one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from typing import Any

from loadmaster.describe.model import Model

__all__ = ["from_hf"]


def from_hf(source: str | PathLike[str] | Mapping[str, Any]) -> Model:
    """Model from a catalogue name, a path to config.json or its folder, or a dict."""
    raise NotImplementedError(json.dumps(str(source)))
