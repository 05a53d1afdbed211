"""Optimizer state as data: loaded without casts, converted only on request, refused where it does not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loadmaster.errors import InvalidInput
from loadmaster.program.codebook import num_blocks
from loadmaster.runtime.optim.codes import code_dtype, decode, encode
from loadmaster.runtime.optim.rules import MOMENTS

if TYPE_CHECKING:
    from loadmaster.runtime.optim.optimizer import Blockwise

__all__ = ["check_groups", "load_parameter"]


def check_groups(optimizer: Blockwise, state_dict: dict[str, Any], *, convert: bool) -> None:
    """Refuse a state of other parameters, or of other options unless it may be converted.

    Raises:
        InvalidInput: what differs, and what to do.
    """
    ours, theirs = optimizer.param_groups, state_dict.get("param_groups", [])
    mine, saved = [len(g["params"]) for g in ours], [len(g["params"]) for g in theirs]
    if mine != saved:
        raise InvalidInput(
            "state_dict.param_groups", saved, f"has other parameters a group than this optimizer's {mine}",
            "build the optimizer over the same parameters in the same groups",
        )  # fmt: skip
    for number, (group, other) in enumerate(zip(ours, theirs, strict=True)):
        for field in ("state_bits", "block"):
            if field not in other:
                raise InvalidInput(
                    f"state_dict.param_groups[{number}]", "no " + field, "is not the state of a loadmaster optimizer",
                    "start from fresh state",
                )  # fmt: skip
            if group[field] != other[field] and not convert:
                raise InvalidInput(
                    f"state_dict.param_groups[{number}].{field}", other[field],
                    f"disagrees with the optimizer's {field}={group[field]}",
                    f"build the optimizer with {field}={other[field]}, or load_state_dict(..., convert=True)",
                )  # fmt: skip


def load_parameter(
    optimizer: Blockwise,
    group: dict[str, Any],
    p: Tensor,
    saved: dict[str, Any],
    saved_block: int,
    *,
    convert: bool,
) -> None:
    """Copy one parameter's saved state, or convert it.

    Raises:
        InvalidInput: sizes differ, a moment is missing, or it is coded where the options want fp32 (or the reverse).
    """
    label = optimizer.shards[p].name or "parameter"
    fresh = optimizer._initialise(group, p)
    fresh["step"].copy_(torch.as_tensor(saved["step"], dtype=torch.float32))
    for name, code in MOMENTS[optimizer.rule]:
        if name not in saved:
            raise InvalidInput(f"state of {label}", sorted(saved), f"has no {name}", "it is of another optimizer")
        data, scales = saved[name], saved.get(f"{name}_scale")
        held = optimizer.shards[p].numel
        _check_moment(f"{label}.{name}", held, data, scales, code_dtype(code), saved_block)
        target = fresh.get(f"{name}_scale")
        if (scales is None) == (target is None) and (scales is None or saved_block == optimizer.block):
            fresh[name] = data.detach().to(p.device).clone()
            if scales is not None:
                fresh[f"{name}_scale"] = scales.detach().to(p.device).clone()
            continue
        if not convert:
            raise InvalidInput(
                f"state of {label}.{name}", "32-bit" if scales is None else "8-bit",
                f"but the options make it {'32-bit' if target is None else '8-bit'}",
                "use the saved min_elements and embeddings, or load_state_dict(..., convert=True)",
            )  # fmt: skip
        data = data.detach().to(p.device)
        values = data if scales is None else decode(data, scales.to(p.device), code, saved_block)
        if target is None:
            fresh[name] = values.clone()
        else:
            fresh[name], fresh[f"{name}_scale"] = encode(values.float(), code, optimizer.block)


def _check_moment(label: str, held: int, data: Tensor, scales: Tensor | None, coded: torch.dtype, block: int) -> None:
    expected = torch.float32 if scales is None else coded
    if data.dtype is not expected or (scales is not None and scales.dtype is not torch.float32):
        raise InvalidInput(
            f"state of {label}", data.dtype, f"is not {expected}", "it was cast when it was saved or loaded"
        )
    if data.numel() != held or (scales is not None and scales.numel() != num_blocks(held, block)):
        raise InvalidInput(
            f"state of {label}", f"{data.numel()} elements", f"is not of {held}",
            "load the range this tensor holds (optim.load_state)",
        )  # fmt: skip
