"""The arguments of `relaygen calibrate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from relaygen.calibration.selection import Choice, Rule

STAGES = ("all", "trace", "score", "select", "report")
REFERENCE_RULE = "reference"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    choice = Choice()
    parser.add_argument("stage", nargs="?", choices=STAGES, default="all", help="one stage (all)")
    for role in ("large", "small"):
        parser.add_argument(f"--{role}", metavar="URL", help=f"server of the {role} model")
        parser.add_argument(f"--{role}-model", metavar="NAME", help="its name (the server's first)")
        parser.add_argument(
            f"--{role}-tokenizer",
            default="auto",
            metavar="ID",
            help="where it renders none",
        )
    parser.add_argument("--prompts", metavar="FILE", help="FILE.jsonl or hf:DATASET[:SPLIT]")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="policy to write")
    parser.add_argument("--name", help="the policy's name (the file's)")
    parser.add_argument("--work", type=Path, metavar="DIR", help="what is kept (OUT.calibration)")
    parser.add_argument("--samples", type=int, default=4, metavar="K", help="traces a prompt (4)")
    parser.add_argument("--limit", type=int, metavar="N", help="prompts to take (all)")
    parser.add_argument("--max-tokens", type=int, default=32768, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.6, metavar="T")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=8, metavar="N")
    parser.add_argument("--scorer", choices=("small", "large"), default="small")
    rules = [rule.value for rule in Rule]
    parser.add_argument("--rule", choices=[*rules, REFERENCE_RULE], default=rules[0])
    parser.add_argument(
        "--sure", type=float, default=choice.sure, metavar="M", help="the large model's margin"
        f" from which a token counts as its own surely ({choice.sure})",
    )  # fmt: skip
    parser.add_argument(
        "--least", type=float, default=choice.least, metavar="P", help="mean success of a chosen"
        f" cue ({choice.least})",
    )  # fmt: skip
    parser.add_argument("--occurrences", type=int, default=choice.occurrences, metavar="N")
    parser.add_argument("--on-bad-line", choices=("stop", "skip"), default="stop")
    parser.add_argument("--force", action="store_true", help="overwrite cues edited by hand")
