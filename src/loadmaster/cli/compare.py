"""``loadmaster compare``: was the prediction of this run right, term by term?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from loadmaster.describe.require import real
from loadmaster.errors import InvalidInput


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run (or its ledger.json).")],
    tolerance: Annotated[
        float | None, typer.Option(help="Exit with 1 if the memory peak is off by more than this many per cent.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Set what was predicted for a run against what it measured."""
    if tolerance is not None:
        real("--tolerance", tolerance)
    body = read_ledger_file(Path(run))
    if as_json:
        print(json.dumps(body))
    else:
        show_ledgers(body)
    if tolerance is not None and not _within(body, tolerance):
        raise typer.Exit(1)


def _within(body: dict[str, Any], tolerance: float) -> bool:
    """The memory peak is off by no more than `tolerance` per cent."""
    from loadmaster.report.comparison import compare_run, read_ledgers

    both = compare_run(read_ledgers(body.get("predicted") or {}), read_ledgers(body["measured"])).get("memory")
    percent = None if both is None else both.total.percent
    return percent is not None and abs(percent) <= tolerance


def read_ledger_file(run: Path) -> dict[str, Any]:
    """The document of a finished run.

    Raises:
        InvalidInput: there is none, or it is damaged.
    """
    path = run / "ledger.json" if run.is_dir() else run
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(
            "run", str(run), f"has no ledger.json ({error.strerror})", "give a folder that loadmaster train finished"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InvalidInput("run", str(path), f"is no JSON ({error})", "run the plan again") from None
    if not isinstance(body, dict) or not (
        isinstance(body.get("measured"), dict) and isinstance(body.get("summary", []), list)
    ):
        raise InvalidInput("run", str(path), "is no ledger of a run", "give the folder that train wrote")
    return body


def show_ledgers(body: dict[str, Any]) -> None:
    """The tables, and the sentence that sums them up."""
    from rich.console import Console

    from loadmaster.report.comparison import compare_run, comparison_table, read_ledgers

    console = Console(emoji=False)
    comparisons = compare_run(read_ledgers(body.get("predicted") or {}), read_ledgers(body["measured"]))
    for kind, both in comparisons.items():
        console.print(comparison_table(kind, both))
    if not comparisons:
        console.print("Nothing was predicted for this run (a model:factory without a config).")
    for line in body.get("summary") or ():
        console.print(line, highlight=False, soft_wrap=True)
