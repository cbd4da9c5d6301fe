"""``python -m fovea.compat run --drop-in NAME script.py ...`` and ``python -m fovea.compat list [NAME]``."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from ._drop_ins import DROP_INS, table
from ._install import install


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fovea.compat", description="Code written for other attention packages, on Fovea.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a script, or with -m a module, with packages in place of others")
    run.add_argument("--drop-in", action="append", required=True, choices=DROP_INS, metavar="NAME", help=f"one of {', '.join(DROP_INS)}; may be repeated")
    run.add_argument("-m", dest="is_module", action="store_true", help="the first word is a module's name")
    run.add_argument("program", metavar="SCRIPT")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="words of the script's own")
    listing = commands.add_parser("list", help="what becomes of each argument, and why")
    listing.add_argument("name", nargs="?", choices=DROP_INS, metavar="NAME", help=f"one of {', '.join(DROP_INS)}; all unless given")
    return parser


def _run(program: str, words: list[str], is_module: bool) -> None:
    """As ``python script.py`` and ``python -m module`` do it."""
    sys.argv = [program, *words]
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
        runpy.run_path(program, run_name="__main__")


def _print(text: str) -> None:
    """A reader that has enough, as head, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where the interpreter's last flush goes


def main(words: list[str] | None = None) -> int:
    """Runs the words of the command line."""
    args = _parser().parse_args(words)
    if args.command == "list":
        names = DROP_INS if args.name is None else (args.name,)
        chosen = [DROP_INS[name] for name in names]
        _print("\n".join(f"# {drop_in.distribution} {drop_in.version}: {drop_in.name}\n\n{table(drop_in)}" for drop_in in chosen))
        return 0
    for name in args.drop_in:
        install(name)
    _run(args.program, args.arguments, args.is_module)
    return 0


if __name__ == "__main__":
    sys.exit(main())
