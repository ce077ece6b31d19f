"""Where a rendered prompt leaves the model."""

from __future__ import annotations

import pytest

from gateway.phase import own_words, phase_of_chat, phase_of_text
from relaygen.policy import Thinking
from relaygen.thinking import Phase

TURN = "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("rendered", "own", "phase"),
    [
        (TURN, "", Phase.UNDECIDED),
        (TURN + "<think>\n", "", Phase.THINKING),
        (TURN + "<think>\n\n</think>\n\n", "", Phase.ANSWER),
        # an earlier turn's thinking is not this one's
        ("</think>Six.<|im_end|>\n" + TURN, "", Phase.UNDECIDED),
        # a prefill that the template continues
        (TURN + "<think>\nWe", "<think>\nWe", Phase.THINKING),
        (TURN + "<think>\nWe\n</think>\n\nIt is", "<think>\nWe\n</think>\n\nIt is", Phase.ANSWER),
        (TURN + "<think>\nWe are", "We are", Phase.THINKING),
        (TURN + "<think>\n\n</think>\n\nIt is", "It is", Phase.ANSWER),
        (TURN + "It is", "It is", Phase.UNDECIDED),
        # one that it closes
        ("<think>\nWe<|im_end|>\n" + TURN, "<think>\nWe", Phase.UNDECIDED),
        ("<think>\nWe\n</think>\nSix.<|im_end|>\n" + TURN, "</think>\nSix.", Phase.UNDECIDED),
    ],
)
def test_phase_of_a_chat(rendered: str, own: str, phase: Phase) -> None:
    assert phase_of_chat(Thinking(), rendered, own) is phase


@pytest.mark.parametrize(
    ("prompt", "phase"),
    [
        ("Once", Phase.UNDECIDED),
        ("user: hi\n<think>\nWe are", Phase.THINKING),
        ("<think>hm</think>Six.\nuser: and seven?\n", Phase.UNDECIDED),
        ("<think>hm</think>\n", Phase.ANSWER),
    ],
)
def test_phase_of_a_raw_prompt(prompt: str, phase: Phase) -> None:
    assert phase_of_text(Thinking(), prompt) is phase


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": "hi"}, ""),
        ({"role": "assistant", "content": "It is"}, "It is"),
        (
            {"role": "assistant", "content": [{"type": "text", "text": "It"}, {"text": " is"}]},
            "It is",
        ),
        ({"role": "assistant", "content": None, "reasoning_content": "We"}, "We"),
        ({"role": "assistant", "content": None}, ""),
    ],
)
def test_own_words_of_a_last_message(message: dict[str, object], words: str) -> None:
    assert own_words(message) == words
