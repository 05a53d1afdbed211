"""``loadmaster validate``: score the laws on tables of measured runs, the project's or your own."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from loadmaster.cli.given import new_parser

__all__ = ["parser", "run"]


def parser() -> ArgumentParser:
    """The command's options."""
    made = new_parser(
        "validate",
        "Price every row of tables of measured runs that can be described, say why not for the rest, and print the\n"
        "errors by source. The columns are those of docs/validation.md; validation/ holds published runs.",
    )
    made.add_argument("files", metavar="FILE.tsv", nargs="+", help="tab-separated tables")
    made.add_argument("--worst", metavar="N", type=int, default=10, help="worst rows to list (10)")
    made.add_argument("--markdown", metavar="PATH", help="write the scoreboard as a page")
    made.add_argument("--json", action="store_true", help="print one JSON document with every row's prediction")
    return made


def run(args: Namespace) -> int:
    """Score and print."""
    from loadmaster.cli.outputs import check_writable
    from loadmaster.describe.require import whole
    from loadmaster.report.validation import score_files, summarise

    whole("--worst", args.worst, least=0)
    if args.markdown:
        check_writable(args.markdown)
    rows = list(score_files(args.files))
    summary = summarise(rows)
    if args.markdown:
        from pathlib import Path

        from loadmaster.report.scoreboard import markdown

        command = f"loadmaster validate validation/*.tsv --markdown {args.markdown}"
        Path(args.markdown).write_text(markdown(rows, summary, command=command), encoding="utf-8")
    if args.json:
        import json

        print(json.dumps({"rows": [row.to_json() for row in rows], "summary": summary}))
    else:
        from loadmaster.report.scoreboard import print_scoreboard

        print_scoreboard(rows, summary, worst=args.worst)
    return 0
