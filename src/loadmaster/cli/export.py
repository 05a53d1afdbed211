"""``loadmaster export``: hand a plan to torchtitan, Megatron-LM, DeepSpeed or accelerate."""

from __future__ import annotations

import json
from typing import Annotated

import typer

__all__ = ["command"]


def command(
    plan: Annotated[str, typer.Argument(help="a file that loadmaster plan -o wrote", metavar="PLAN")],
    to: Annotated[str, typer.Option(help="torchtitan, megatron, deepspeed or accelerate-fsdp")],
    output: Annotated[str | None, typer.Option("--output", "-o", help="folder to write into; else printed")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Write the plan's layout in another framework's own configuration, with a launch script."""
    from pathlib import Path

    from loadmaster.describe.plan_file import PlanFile
    from loadmaster.describe.toml import write_atomic
    from loadmaster.errors import InvalidInput
    from loadmaster.export.api import export

    made = export(PlanFile.load(plan), to)
    written = []
    if output is not None:
        folder = Path(output)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput("--output", output, f"cannot be made ({error.strerror})", "give a folder") from None
        for name, text in made.files.items():
            write_atomic(folder / name, text)
            written.append(str(folder / name))
    if as_json:
        print(json.dumps({"to": to, "files": dict(made.files), "written": written, "notes": list(made.notes)}))
        return
    for name, text in made.files.items():
        print(f"Wrote {Path(output) / name}" if output is not None else f"# --- {name}\n{text}")
    for note in made.notes:
        print(f"Note: {note}")
