"""The command lines of the benchmarks, where they are alike."""

from __future__ import annotations

import argparse


def new_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser that begins its help with the first paragraph of a script's ``doc``, and tells the defaults of options."""
    return argparse.ArgumentParser(description=(doc or "").split("\n\n")[0], formatter_class=_HelpFormatter)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Passes over defaults that say nothing: "off", no entries, and None, which is for an option's help to explain."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_silent = action.default is None or action.default is False or action.default == []
        return action.help if is_silent else super()._get_help_string(action)
