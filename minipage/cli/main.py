"""The command line: one subcommand a module, each with ``add_parser`` and a ``run`` that the parser carries along."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from . import chat, demo, generate, inspect
from .console import run_guarded


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 2 for bad input (one line on stderr), 130 for Ctrl-C."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    return run_guarded("minipage", lambda: args.run(args))


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="minipage", description="A lightweight LLM inference runtime without torch, on a paged KV cache."
    )
    parser.add_argument("--version", action="version", version=f"minipage {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for command in (generate, chat, inspect, demo):
        command.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
