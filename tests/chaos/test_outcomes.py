"""The judge: what passes for equal, for an honest error, and what is wrong in which way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.chaos.outcomes import Got, Verdict, judge, read_stream, read_whole
from tests.chaos.transcripts import Question, continuation, question_in, transcript
from tests.gateway.fakes import Tokenizer

USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "relaygen": {"resumes": 3}}
ERROR = {"error": {"message": "gone", "type": "server_error", "param": None, "code": "x"}}
REFERENCE = Got(
    reasoning="Six. Now", content="12", finishes=["stop"], usage=USAGE, done=True
)  # fmt: skip


def chunk(reason: str | None = None, **delta: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


THOUGHT = chunk(reasoning_content="Six. Now")
CONTENT = chunk(content="12")
FINISH = chunk("stop")
LAST = {"choices": [], "usage": USAGE}
SOUND = [THOUGHT, CONTENT, FINISH, LAST, "[DONE]"]


def wire(*events: Any) -> bytes:
    said = [e if isinstance(e, str) else json.dumps(e) for e in events]
    return "".join(f"data: {one}\n\n" for one in said).encode()


def verdict(*events: Any, cut: bool = False) -> tuple[Verdict, str]:
    return judge(read_stream(wire(*events), cut=cut), REFERENCE)


def test_the_same_bytes_are_equal() -> None:
    assert verdict(*SOUND) == (Verdict.EQUAL, "")
    assert read_stream(wire(*SOUND)).resumes == 3


def test_comments_between_the_events_change_nothing() -> None:
    assert judge(read_stream(b": ping\n" + wire(*SOUND)), REFERENCE)[0] is Verdict.EQUAL


@pytest.mark.parametrize("said", [[], [THOUGHT], [THOUGHT, CONTENT]])
@pytest.mark.parametrize("cut", [False, True])
def test_an_error_told_after_true_text_is_an_honest_one(said: list[Any], cut: bool) -> None:
    assert verdict(*said, ERROR, cut=cut) == (Verdict.ERROR, "")


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([THOUGHT, CONTENT, FINISH, LAST], "no [DONE]"),
        ([THOUGHT], "no [DONE]"),
        ([], "no [DONE]"),
        ([THOUGHT, CONTENT, LAST, "[DONE]"], "finish_reason []"),
        ([THOUGHT, CONTENT, chunk("length"), LAST, "[DONE]"], "finish_reason ['length']"),
        ([THOUGHT, CONTENT, FINISH, FINISH, LAST, "[DONE]"], "goes on after"),
        ([THOUGHT, FINISH, LAST, "[DONE]"], "another text"),
        ([THOUGHT, THOUGHT, CONTENT, FINISH, LAST, "[DONE]"], "another text"),
        ([THOUGHT, CONTENT, FINISH, "[DONE]"], "tokens counted"),
        ([*SOUND, "[DONE]"], "after the end"),
        ([THOUGHT, ERROR, "[DONE]"], "after the end"),
        ([THOUGHT, FINISH, ERROR], "finish_reason and an error"),
        ([CONTENT, ERROR], "false text"),
        ([chunk(reasoning_content="Seven"), ERROR], "false text"),
        ([THOUGHT, {"error": {"message": "gone"}}], "shape of its own"),
    ],
)
def test_what_is_wrong_is_named(events: list[Any], why: str) -> None:
    found, said = verdict(*events)
    assert (found, why in said) == (Verdict.WRONG, True), said


def test_a_cut_with_no_error_told_is_wrong() -> None:
    assert verdict(*SOUND[:2], cut=True)[0] is Verdict.WRONG
    assert judge(read_stream(wire(*SOUND)[:-30]), REFERENCE)[0] is Verdict.WRONG


def test_a_reply_in_one_piece() -> None:
    message = {"reasoning_content": "Six. Now", "content": "12"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    body = json.dumps({"choices": [choice], "usage": USAGE}).encode()
    assert judge(read_whole(200, body), REFERENCE) == (Verdict.EQUAL, "")
    assert judge(read_whole(502, json.dumps(ERROR).encode()), REFERENCE)[0] is Verdict.ERROR
    assert judge(read_whole(400, json.dumps(ERROR).encode()), REFERENCE)[0] is Verdict.WRONG
    assert judge(read_whole(502, b"<html>"), REFERENCE)[0] is Verdict.WRONG


# ---- transcripts --------------------------------------------------------------------------------


def test_a_transcript_is_gone_on_with_from_every_byte() -> None:
    asked = Question(3, 14)
    prompt = f"<|im_start|>user\n{asked.text}<|im_end|>\n<|im_start|>assistant\n".encode()
    whole = transcript(3)
    for at in range(len(whole) + 1):
        assert b"".join(continuation(prompt + whole[:at])) == whole[at:]
    with pytest.raises(AssertionError):
        continuation(prompt + whole[:20] + b"~")
    assert question_in(prompt) == asked


def test_transcripts_have_the_traps_in_them() -> None:
    every = b"".join(transcript(number) for number in range(20))
    for trap in (b"3.14", "👍".encode(), b" Now", b" known", b".\n\n", b"?", "数".encode()):
        assert trap in every
    lengths = [len(Tokenizer().encode(transcript(n).decode())) for n in range(60)]
    assert min(lengths) >= 50
    assert max(lengths) <= 160
