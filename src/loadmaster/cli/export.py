"""``loadmaster export``: hand a plan to another framework, or a trained run to Hugging Face."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from loadmaster.cli.given import new_parser

__all__ = ["parser", "run"]


def parser() -> ArgumentParser:
    """The command's options."""
    made = new_parser(
        "export",
        "Write the plan's layout in another framework's own configuration, with a launch script; "
        "or (--to hf) the weights that a run trained as a folder that transformers loads.",
    )
    made.add_argument("plan", metavar="PLAN", help="a file that loadmaster plan -o wrote; with --to hf, a run's folder")
    made.add_argument(
        "--to", metavar="NAME", required=True, help="torchtitan, megatron, deepspeed, accelerate-fsdp or hf"
    )
    made.add_argument("--output", "-o", metavar="DIR", help="folder to write into; left out: printed")
    made.add_argument("--json", action="store_true", help="print one JSON document")
    return made


def run(args: Namespace) -> int:
    """Export, write or print."""
    from pathlib import Path

    from loadmaster.describe.plan_file import PlanFile
    from loadmaster.describe.toml import write_atomic
    from loadmaster.errors import InvalidInput
    from loadmaster.export.api import export

    if args.to == "hf":
        return _export_weights(args)
    made = export(PlanFile.load(args.plan), args.to)
    written = []
    if args.output is not None:
        folder = Path(args.output)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput("--output", args.output, f"cannot be made ({error.strerror})", "give a folder") from None
        for name, text in made.files.items():
            write_atomic(folder / name, text)
            written.append(str(folder / name))
    if args.json:
        print(json.dumps({"to": args.to, "files": dict(made.files), "written": written, "notes": list(made.notes)}))
        return 0
    for name, text in made.files.items():
        print(f"Wrote {Path(args.output) / name}" if args.output is not None else f"# --- {name}\n{text}")
    for note in made.notes:
        print(f"Note: {note}")
    return 0


def _export_weights(args: Namespace) -> int:
    from pathlib import Path

    from loadmaster.errors import InvalidInput
    from loadmaster.runtime.hf_folder import export_hf

    if args.output is None:
        raise InvalidInput("--output", "missing", "must name the folder to write", "add -o DIR")
    folder = export_hf(Path(args.plan), Path(args.output))
    written = sorted(str(path) for path in folder.iterdir())
    print(json.dumps({"to": "hf", "written": written}) if args.json else f"Wrote {', '.join(written)}")
    return 0
