"""``minipage demo-model``: fetch the model that is used where none is named, and say where it lies."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "demo-model",
        help="fetch the demo model and print its path",
        description="Fetch SmolLM2-135M-Instruct (94 MiB, Apache-2.0), used where no model is named, and print its path.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fetch the model, unless it is there already, and print its path."""
    from ..inspection import locate_model

    print(locate_model(None))
    return 0
