"""Fresh arithmetic problems in the form that the tiny pair was trained on, and their grading.

python -m gateway.demo.problems COUNT SEED > problems.jsonl
"""

from __future__ import annotations

import json
import random
import re
import sys
from dataclasses import dataclass

from gateway.demo.pair.task import trace

_INTEGER = re.compile(r"-?\d+")
_THINKING_END = "</think>"


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and the integer that answers it."""

    question: str
    expected: int


def problems(count: int, seed: int) -> list[Problem]:
    """`count` different problems; the same `seed` gives the same ones, more of them or fewer."""
    source = random.Random(seed)
    found: dict[str, Problem] = {}
    while len(found) < count:
        question, _, result = trace(source)
        found.setdefault(question, Problem(question, result))
    return list(found.values())


def is_right(problem: Problem, reply: str) -> bool:
    """Whether the last integer of the reply's answer is the result.

    The answer is what follows the thinking; a reply that never ends its thinking has none.
    """
    _, tag, after = reply.rpartition(_THINKING_END)
    if not tag and "<think>" in reply:
        return False
    integers = _INTEGER.findall(after if tag else reply)
    return bool(integers) and int(integers[-1]) == problem.expected


def main() -> None:
    """Prints problems as JSON lines, in GSM8K's form."""
    count, seed = (int(argument) for argument in sys.argv[1:3])
    for problem in problems(count, seed):
        answer = f"#### {problem.expected}"
        sys.stdout.write(json.dumps({"question": problem.question, "answer": answer}) + "\n")


if __name__ == "__main__":
    main()
