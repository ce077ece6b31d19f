"""The quick ways say the same as the thorough ones: chunks read at once, frames made beforehand."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import sse
from gateway.engines.plain_chunks import plain_pieces
from gateway.engines.reading import ChunkReader, chunk_object
from gateway.engines.served_tokenizer import TokenIdsReader
from gateway.replies import Reply
from relaygen.events import Delta, DeltaKind, Piece, Role

URL = "http://127.0.0.1:1"
texts = st.text(min_size=1, max_size=6)
names = st.text(st.characters(min_codepoint=1, exclude_categories=["Cs"]), min_size=1)
logprobs = st.floats(-50, 0)


def chunk(text: str, token: int, logprob: float | None, top: dict[str, float] | None) -> Any:
    told = {
        "tokens": [text],
        "token_logprobs": [logprob],
        "top_logprobs": [top],
        "text_offset": [0],
    }
    choice = {"index": 0, "text": text, "token_ids": [token], "finish_reason": None}
    return {"id": "x", "choices": [{**choice, "logprobs": told}], "usage": None}


chunks = st.builds(
    chunk,
    texts,
    st.integers(0, 2**31),
    st.none() | logprobs,
    st.none() | st.dictionaries(texts, logprobs, max_size=3),
)


def thoroughly(events: list[bytes]) -> list[Piece]:
    reader: ChunkReader = TokenIdsReader()
    return [piece for event in events for piece in reader.read(chunk_object(event, URL))]


@given(st.lists(chunks, max_size=5))
def test_plain_chunks_are_read_as_one_by_one(given: list[Any]) -> None:
    events = [orjson.dumps(one) for one in given]
    assert plain_pieces(events, top=True) == thoroughly(events)
    without = [piece._replace(top=()) for piece in thoroughly(events)]
    assert plain_pieces(events, top=False) == without


PLAIN = chunk("a", 7, -0.1, None)


def changed(**choice: object) -> dict[str, Any]:
    return {**PLAIN, "choices": [{**PLAIN["choices"][0], **choice}]}


@pytest.mark.parametrize(
    "other",
    [
        changed(finish_reason="stop"),
        changed(token_ids=[1, 2]),
        changed(token_ids=[]),
        changed(token_ids=[-1]),
        changed(token_ids=[True]),
        changed(token_ids=["1"]),
        changed(text="ab"),
        changed(text=None),
        changed(logprobs={"tokens": ["a", "b"], "token_logprobs": [-1, -1]}),
        {**PLAIN, "usage": {"completion_tokens": 1}},
        {**PLAIN, "choices": []},
        {**PLAIN, "choices": PLAIN["choices"] * 2},
        {**PLAIN, "error": {"message": "no"}},
        {"error": "no"},
        [],
        None,
    ],
    ids=lambda other: repr(other)[-60:],
)
def test_one_that_is_not_leaves_all_to_the_thorough_way(other: object) -> None:
    events = [orjson.dumps(PLAIN), orjson.dumps(other)]
    assert plain_pieces(events, top=True) is None
    assert plain_pieces(events, top=False) is None


@pytest.mark.parametrize("event", [b"[DONE]", b"", b"{", b"{},{}", b'{"choices":"\xff"}'])
def test_what_is_no_chunk_is_left_to_the_thorough_way(event: bytes) -> None:
    assert plain_pieces([orjson.dumps(PLAIN), event], top=False) is None


replies = st.builds(
    Reply,
    id=names,
    created=st.integers(0, 2**31),
    model=names,
    chat=st.booleans(),
    field=st.sampled_from(["reasoning_content", "reasoning", "both", "inline"]),
    trace=st.booleans(),
    logprobs=st.sampled_from([None, None, 2]),
)
kinds = st.sampled_from([DeltaKind.REASONING, DeltaKind.ANSWER])
deltas = st.lists(st.builds(Delta, st.sampled_from(Role), st.integers(0, 3), kinds, st.text()))


@given(replies, st.integers(0, 2), deltas)
def test_frames_are_what_would_be_written_anew(
    reply: Reply, index: int, given: list[Delta]
) -> None:
    for delta in given:
        anew = sse.event(orjson.dumps(reply.delta_chunk(index, delta)))
        assert reply.delta_event(index, delta) == anew
