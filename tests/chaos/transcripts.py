"""What the simulated models write: one transcript a question, the same whoever goes on with it.

At temperature 0 a sound pair of models that agree would do just this, so whatever happens to the
engines, the client must get the transcript, byte for byte.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from random import Random

from tests.gateway.fakes.script import ASSISTANT
from tests.gateway.fakes.tokens import Tokenizer

CUES = ("Now", "Thus", "So")
_CUT_SHORT = 5
"""Every fifth question asks for fewer tokens than its transcript has."""
_ASKED = re.compile(rb"Question (\d+), try (\d+)\?")
_WORDS = (
    " the sum", " is", " known", " soon", " thusly", " 3.14", " 42", " café", " naïve", " 数学",
    " 👍🏽", " x=2", " («so»)", " e.g", " half", " of", " it", " Ünïcode", " then", " 1,000",
)  # fmt: skip
_OPENERS = (*(f" {cue}" for cue in CUES), " We", " It", " Let me")
_ENDS = (".", ".", "?", "!", ".\n\n")


@dataclass(frozen=True, slots=True)
class Question:
    """`trial` tells one generation from others with the same question."""

    number: int
    trial: int = 0

    @property
    def text(self) -> str:
        return f"Question {self.number}, try {self.trial}?"

    @property
    def max_tokens(self) -> int:
        return 37 if self.number % _CUT_SHORT == 0 else 1000

    @property
    def streamed(self) -> bool:
        """Every seventh generation is asked for in one piece."""
        return self.trial % 7 != 3


def question_in(prompt: bytes) -> Question | None:
    """The question of a prompt, or of a request that shows it as text."""
    found = _ASKED.search(prompt)
    return Question(int(found.group(1)), int(found.group(2))) if found else None


@cache
def transcript(number: int) -> bytes:
    """Thinking and answer, about 60 to 120 tokens with some of every kind of trap in them."""
    rng = Random(f"transcript {number}")
    thought = "".join(_sentence(rng) for _ in range(rng.randint(4, 6)))
    answer = "\n\n" + "".join(_sentence(rng) for _ in range(rng.randint(1, 2)))
    return f"<think>\n{thought.lstrip()}</think>{answer}".encode()


def _sentence(rng: Random) -> str:
    words = "".join(rng.choices(_WORDS, k=rng.randint(3, 5)))
    return rng.choice(_OPENERS) + words + rng.choice(_ENDS)


@cache
def _pieces(number: int) -> tuple[bytes, ...]:
    tokenizer = Tokenizer()
    ids = tokenizer.encode(transcript(number).decode())
    return tuple(tokenizer.piece(one) for one in ids)


def continuation(prompt: bytes) -> list[bytes]:
    """The tokens that follow. Raises AssertionError where the prompt has left the transcript.

    Bytes and not text: a prompt of token ids may end inside a character.
    """
    question = question_in(prompt)
    assert question is not None, f"no question in {prompt!r}"
    written = prompt.rpartition(ASSISTANT.encode())[2]
    whole = transcript(question.number)
    assert whole.startswith(written), f"{written!r} is no beginning of {whole!r}"
    left, rest = len(written), []
    for piece in _pieces(question.number):
        if left < len(piece):
            rest.append(piece[left:])
        left = max(0, left - len(piece))
    return rest
