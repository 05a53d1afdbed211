"""The ``loadmaster`` command: a table of commands, each imported only when it is the one asked for."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType

from loadmaster import __version__
from loadmaster.errors import LoadmasterError

# command -> (module below loadmaster.cli, its line in the tour); the order is the order of use
COMMANDS = {
    "price": ("price", "Will this layout fit, how long is a step, what should be cut first?"),
    "plan": ("plan", "Which layout is the fastest that fits on these devices?"),
    "measure": ("measure", "How fast are my devices and links really? Writes a cluster file."),
    "trace": ("trace", "Where does the memory of my module go, op by op? No device needed."),
    "train": ("train", "Run a plan, then set predicted against measured."),
    "compare": ("compare", "Was the prediction of this run right, term by term?"),
    "verify": ("verify", "Does my layout compute the same as one process?"),
    "audit": ("audit", "fp16 or bf16? Which updates are lost?"),
    "validate": ("validate", "Score the laws on tables of measured runs."),
    "export": ("export", "Hand a plan to torchtitan, Megatron-LM, DeepSpeed or accelerate."),
    "catalog": ("catalog", "Which models, devices and stacks are known by name?"),
}

TOUR = """\
Usage: loadmaster COMMAND [OPTIONS]

Plan a training step before paying for the GPU, run it, and set predicted against measured.

A first walk:
  loadmaster price meta-llama/Meta-Llama-3-8B --on 8xh100-sxm --seq 8192 --batch 32 --layout dp_shard=8,zero=3
  loadmaster plan  meta-llama/Meta-Llama-3-8B --on 8xh100-sxm --seq 8192 --batch 32

Commands:
{commands}

loadmaster COMMAND --help shows a command's options. Every command takes --json.
Exit status: 0 done, 1 the answer is no (does not fit, does not agree), 2 bad input.
"""


def main(argv: list[str] | None = None) -> None:
    """Run one command; a user's error is one message on stderr, never a traceback."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("--help", "-h", "help"):
        print(TOUR.format(commands="\n".join(f"  {name:9} {line}" for name, (_, line) in COMMANDS.items())))
        sys.exit(0)
    if args[0] in ("--version", "-V"):
        print(f"loadmaster {__version__}")
        sys.exit(0)
    if args[0] not in COMMANDS:
        print(f"loadmaster: {args[0]}: is no command; use one of {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    sys.exit(_run(args[0], args[1:]))


def _run(name: str, args: list[str]) -> int:
    """Import the command's file, hand it its arguments, turn what it raises into an exit status."""
    try:
        module = import_module(f"loadmaster.cli.{COMMANDS[name][0]}")
        return _with_argparse(module, args) if hasattr(module, "parser") else _with_typer(module, name, args)
    except LoadmasterError as error:
        print(f"loadmaster: {error}", file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:  # the reader of a pipe has closed it: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("loadmaster: interrupted", file=sys.stderr)
        return 130


def _with_argparse(module: ModuleType, args: list[str]) -> int:
    """The commands that have to answer at once: argparse starts in a tenth of typer's time."""
    return int(module.run(module.parser().parse_args(args)))


def _with_typer(module: ModuleType, name: str, args: list[str]) -> int:
    import typer

    try:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        app.command(name)(module.command)
        return app(args, prog_name=f"loadmaster {name}", standalone_mode=False) or 0
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:  # the parser's own usage errors: typer vendors its exception types
        if not hasattr(error, "format_message"):
            raise
        raise LoadmasterError(f"{error.format_message()}; loadmaster {name} --help lists the options") from None
