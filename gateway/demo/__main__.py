"""`python -m gateway.demo`: the demo's comparison on servers that already run (vLLM, say)."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from openai import OpenAIError
from rich.console import Console

from gateway.demo.ask import Target
from gateway.demo.compare import Plan, compare
from gateway.demo.report import markdown, summary, table


def main(argv: Sequence[str] | None = None) -> int:
    """Compares and prints; returns 1, with the reason on stderr, where a server refuses."""
    options = _parser().parse_args(argv)
    try:
        found = asyncio.run(compare(_plan(options)))
    except OpenAIError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    console = Console(highlight=False)
    if options.json:
        options.json.write_text(json.dumps(found.as_dict(), indent=2) + "\n", encoding="utf-8")
    if options.markdown:
        console.print(markdown(found), markup=False, soft_wrap=True)
    else:
        console.print(table(found))
        console.print("\n".join(summary(found)), markup=False, soft_wrap=True)
    return 0


def _plan(options: argparse.Namespace) -> Plan:
    return Plan(
        large=Target(*options.large),
        small=Target(*options.small),
        relay=Target(*options.relay),
        count=options.problems,
        seed=options.seed,
        max_tokens=options.max_tokens,
        cache_salt=options.cache_salt,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gateway.demo", description=__doc__)
    add = parser.add_argument
    for name, what in (("large", "engine"), ("small", "engine"), ("relay", "gateway and policy")):
        add(
            f"--{name}",
            nargs=2,
            required=True,
            metavar=("URL", "MODEL"),
            help=f"{what}; the URL ends in /v1",
        )
    add("--problems", type=int, default=24, metavar="N", help="default 24")
    add("--seed", type=int, default=1, help="of the problems (default 1)")
    add("--max-tokens", type=int, default=1024, metavar="N", help="of a reply (default 1024)")
    add("--cache-salt", action="store_true", help="a prefix cache for each mode (vLLM)")
    add("--json", type=Path, metavar="FILE", help="write the comparison there")
    add("--markdown", action="store_true", help="print the comparison as Markdown")
    return parser


if __name__ == "__main__":
    sys.exit(main())
