"""What the command line takes, from its own parser."""

from __future__ import annotations

import argparse

from gateway.cli import _parser


def parsed(words: list[str]) -> argparse.Namespace:
    return _parser()[0].parse_args(words)


def paths_of_commands() -> dict[tuple[str, ...], set[str]]:
    """Flags by command, like ("policy", "check"); the longer paths first."""
    found: dict[tuple[str, ...], set[str]] = {}

    def walk(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> None:
        found[path] = {flag for action in parser._actions for flag in action.option_strings}
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, inner in action.choices.items():
                    walk(inner, (*path, name))

    walk(_parser()[0], ())
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))
