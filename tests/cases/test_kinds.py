"""The kinds behind the cases: whatever way a stream is cut and written, the client reads the same.

In memory, from a fake engine's chunks to the client's text; at the end a few over sockets.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.engines.chat import Chat, ChatReader
from relaygen.session import Limits
from tests.cases.memory import ASKED, COMPLETING, DIALECTS, POLICY, Dialect, Relay, Wiring, events
from tests.cases.support import BY_CHAT, pair_of, served_by
from tests.cases.test_sse_parsing import TAIL, text_of, wire
from tests.gateway.fakes import FakeEngine, FakeLlamaCpp, FakeSglang, FakeTgi, FakeVllm, story
from tests.gateway.fakes.http import Connection
from tests.gateway.support import ANSWER, REASONING, Stage, ask

OPEN, CLOSE = "<think>", "</think>"

# ---- any bytes ----------------------------------------------------------------------------------

NOISE = [b":", b": ping", b": OPENROUTER PROCESSING", b"event: message", b"id: 1", b"retry: 5"]


@st.composite
def wirings(draw: st.DrawFn) -> Wiring:
    """Any legal way to write a stream's events, and any cut of its bytes."""
    ends = draw(st.lists(st.sampled_from([b"\n", b"\r\n", b"\r"]), min_size=1, max_size=4))
    noise = st.sampled_from([(), *[(line,) for line in NOISE], (b"data:", b""), (b":", b"")])
    noises = draw(st.lists(noise, min_size=1, max_size=5))
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=5) | st.just([10**9]))
    fields = draw(st.lists(st.sampled_from([b"data: ", b"data:"]), min_size=1, max_size=3))
    over_lines, mark = draw(st.booleans()), draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))

    def wiring(data: Sequence[bytes]) -> Iterable[bytes]:
        lines: list[bytes] = []
        for one, before, field in zip(data, cycle(noises), cycle(fields), strict=False):
            parts = in_lines(one) if over_lines else [one]
            lines += [*before, *[field + part for part in parts], b""]
        return pieces(mark + ended(lines, ends), sizes)

    return wiring


def in_lines(data: bytes) -> list[bytes]:
    """An event's JSON over several lines, which are several `data` fields."""
    if data == b"[DONE]":
        return [data]
    return json.dumps(json.loads(data), indent=0, ensure_ascii=False).encode().split(b"\n")


def ended(lines: Sequence[bytes], ends: Sequence[bytes]) -> bytes:
    r"""The lines with their ends; a \n after a \r would be no end of its own."""
    out = b""
    for line, end in zip(lines, cycle(ends), strict=False):
        joins = out.endswith(b"\r") and not line and end == b"\n"
        out += line + (b"\r" if joins else end)
    return out


def pieces(wire: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    at = 0
    for size in cycle(sizes):
        if at >= len(wire):
            return
        yield wire[at : at + size]
        at += size


# ---- any text -----------------------------------------------------------------------------------

PARTY = tuple(bytes([byte]) for byte in "🎉".encode())
WORDS = st.sampled_from(
    [
        *[(t,) for t in (" Now", " Thus", "Now", " know", ".", "!", '."', "\n", "\n\n", " ", "  ")],
        *[(t,) for t in (" 3", "14", "1", ". ", "ok.\n", "</", "think>", "北京", " No", "w")],
        PARTY,
        ("ci", "té", "."),
    ]
)


def tokens(least: int = 0, most: int = 12) -> st.SearchStrategy[tuple[str | bytes, ...]]:
    runs = st.lists(WORDS, min_size=least, max_size=most)
    return runs.map(lambda found: tuple(token for run in found for token in run))


@st.composite
def stories(draw: st.DrawFn) -> tuple[str | bytes, ...]:
    """What the models write: a thought that nothing repeats, and an answer."""
    return (OPEN, "Once", *draw(tokens()), CLOSE, *draw(tokens(most=5)))


def parts_of(tokens: Iterable[str | bytes]) -> tuple[str, str]:
    """Thought and answer."""
    text = b"".join(t.encode() if isinstance(t, str) else t for t in tokens).decode()
    thought, _, answer = text.removeprefix(OPEN).partition(CLOSE)
    return thought, answer


@given(st.sampled_from(DIALECTS), stories(), wirings(), st.integers(1, 5))
def test_any_way_to_write_a_stream_tells_the_client_the_same(
    dialect: Dialect, tokens: tuple[str | bytes, ...], wiring: Wiring, tokens_per_chunk: int
) -> None:
    generation = Relay(dialect, story(*tokens), tokens_per_chunk=tokens_per_chunk)
    told = generation.told(wiring)
    assert told == generation.told()
    assert (told.reasoning, told.content, told.finish) == (*parts_of(tokens), "stop")


@pytest.mark.parametrize("dialect", DIALECTS, ids=repr)
def test_every_single_cut_of_the_bytes_tells_the_client_the_same(dialect: Dialect) -> None:
    tokens = (OPEN, "Si", *PARTY, ".", " Now", "é", ".", CLOSE, "北", *PARTY)
    generation = Relay(dialect, story(*tokens))
    whole = generation.told()
    assert (whole.reasoning, whole.content) == parts_of(tokens)
    for size in (1, 2, 3, 5, 64):
        for shift in range(0, size, max(1, size // 8)):
            at = (shift or size, *[size] * 10_000)
            assert generation.told(lambda data, at=at: pieces(plain(data), at)) == whole


def plain(data: Sequence[bytes]) -> bytes:
    return ended([line for one in data for line in (b"data: " + one, b"")], [b"\n"])


# ---- any deltas ---------------------------------------------------------------------------------

OF_A_THOUGHT = [
    lambda text: {"reasoning": text},
    lambda text: {"reasoning_content": text},
    lambda text: {"reasoning": text, "reasoning_content": text, "content": None},
    lambda text: {"reasoning": text, "reasoning_content": None, "content": ""},
    lambda text: {"reasoning": "", "reasoning_content": text, "role": "assistant"},
]
OF_AN_ANSWER = [
    lambda text: {"content": text},
    lambda text: {"content": text, "reasoning": None, "reasoning_content": ""},
]
BEGUN = st.text("ab .\n", min_size=1, max_size=9)
REST = st.text("cd北 .\n", max_size=12).map(lambda text: f"c{text}")  # repeats nothing begun


@st.composite
def deltas(draw: st.DrawFn, text: str, forms: Sequence[Any]) -> list[dict[str, Any]]:
    """The text cut anywhere, each part in one of the forms."""
    places = draw(st.lists(st.integers(0, len(text)), max_size=5).map(sorted))
    parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    return [draw(st.sampled_from(forms))(part) for part in parts]


def read(deltas: Iterable[dict[str, Any]], prefix: str) -> str:
    """What the gateway takes a chat's stream for."""
    choices = [{**TAIL, "finish_reason": None, "delta": delta} for delta in deltas]
    reader = ChatReader(Chat({"messages": ASKED}, POLICY.thinking), prefix)
    return text_of(events([wire(*choices, TAIL)], reader))


@given(st.data(), BEGUN | st.just(""), REST, REST, st.booleans())
def test_a_server_that_tells_thoughts_apart_is_read_whatever_its_fields(
    data: st.DataObject, begun: str, thought: str, answer: str, side_by_side: bool
) -> None:
    thoughts = data.draw(deltas(thought, OF_A_THOUGHT))
    answers = data.draw(deltas(answer, OF_AN_ANSWER))
    if side_by_side:  # the thought's end and the answer's beginning in one delta
        first = {**answers[0], **{k: v for k, v in thoughts[-1].items() if v and k != "role"}}
        thoughts, answers = thoughts[:-1], [first, *answers[1:]]
    prefix, opening = (OPEN + begun, "") if begun else ("", OPEN)
    assert read([*thoughts, *answers], prefix) == f"{opening}{thought}{CLOSE}{answer}"


@given(st.data(), BEGUN, REST, REST, st.sampled_from([0, 1, 2]))
def test_a_server_that_tells_nothing_apart_is_read_wherever_it_goes_on(
    data: st.DataObject, begun: str, thought: str, answer: str, where: int
) -> None:
    prefix, rest = [
        ("", f"{OPEN}{thought}{CLOSE}{answer}"),
        (OPEN + begun, f"{thought}{CLOSE}{answer}"),
        (f"{OPEN}{begun}{CLOSE}{begun}", answer),
    ][where]
    assert read(data.draw(deltas(rest, OF_AN_ANSWER)), prefix) == rest


@given(st.data(), BEGUN, REST)
def test_an_answer_gone_on_with_is_one_whatever_its_fields(
    data: st.DataObject, begun: str, answer: str
) -> None:
    mixed = data.draw(deltas(answer, [*OF_A_THOUGHT, *OF_AN_ANSWER]))
    assert read(mixed, f"{OPEN}{begun}{CLOSE}{begun}") == answer


@given(st.data(), BEGUN, REST, st.booleans())
def test_a_message_that_a_server_repeats_is_not_told_twice(
    data: st.DataObject, begun: str, thought: str, apart: bool
) -> None:
    forms, echo = (OF_A_THOUGHT, begun) if apart else (OF_AN_ANSWER, OPEN + begun)
    repeated = data.draw(deltas(echo, forms))
    assert read([*repeated, *data.draw(deltas(thought, forms))], OPEN + begun) == thought


@given(st.data(), st.text("<thab", min_size=1, max_size=6))
def test_text_that_only_begins_like_the_message_is_no_repetition(
    data: st.DataObject, rest: str
) -> None:
    prefix = f"{OPEN}a longer thought than that"
    assert read(data.draw(deltas(rest, OF_AN_ANSWER)), prefix) == rest


# ---- any stop strings ---------------------------------------------------------------------------


@st.composite
def stops_for(draw: st.DrawFn, text: str) -> list[str]:
    """Some that the text has in it, and some that it may only begin."""
    places = draw(st.lists(st.integers(0, len(text) - 1), min_size=1, max_size=2))
    found = [text[at : at + draw(st.integers(2, 5))] for at in places]
    ends = st.text("abN ", max_size=2)
    return found + [stop + draw(ends) for stop in found if draw(st.booleans())]


@st.composite
def splits(draw: st.DrawFn, text: str) -> tuple[str, ...]:
    places = sorted({0, len(text), *draw(st.sets(st.integers(0, len(text))))})
    return tuple(text[a:b] for a, b in pairwise(places))


def stopped(text: str, stops: Sequence[str]) -> str:
    """Up to the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))]
    return text


@given(st.data(), st.sampled_from(COMPLETING), st.text("abN ", min_size=1, max_size=16))
def test_stop_strings_end_the_answer_at_the_same_place_over_any_tokens(
    data: st.DataObject, dialect: Dialect, text: str
) -> None:
    stops = data.draw(stops_for(text))
    thought = "".join(stops)  # is no answer
    script = story(OPEN, "Once", thought, CLOSE, *data.draw(splits(text)))
    limits = Limits(stops=tuple(stops))
    per_chunk = data.draw(st.integers(1, 4))
    told = Relay(dialect, script, limits=limits, tokens_per_chunk=per_chunk).told()
    assert (told.reasoning, told.content) == ("Once" + thought, stopped(text, stops))


# ---- over sockets -------------------------------------------------------------------------------


@pytest.fixture
def small_writes(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Engines send this many bytes at a time."""
    size, send = request.param, Connection.send

    def in_parts(self: Connection, data: bytes) -> None:
        for part in pieces(data, [size]):
            send(self, part)

    monkeypatch.setattr(Connection, "send", in_parts)


async def told_over_sockets(stage: Stage, engines: Sequence[FakeEngine], backend: Any) -> Any:
    served = await served_by(stage, *engines, backend)
    return (await ask(served))["choices"][0]["message"]


WHOLE = {"role": "assistant", "reasoning_content": REASONING, "content": ANSWER}


@pytest.mark.usefixtures("small_writes")
@pytest.mark.parametrize("small_writes", [5], indirect=True)
@pytest.mark.parametrize("dialect", [FakeVllm, FakeLlamaCpp, FakeSglang, FakeTgi])
async def test_bytes_cut_by_the_network_change_nothing(
    stage: Stage, dialect: type[FakeEngine]
) -> None:
    engines = pair_of(dialect, vocabularies=2)
    for engine in engines:
        engine.line_end, engine.comments = b"\r\n", True
    assert await told_over_sockets(stage, engines, {}) == WHOLE


@pytest.mark.parametrize("tokens_per_chunk", [2, 3, 20])
@pytest.mark.parametrize("dialect", [FakeVllm, FakeLlamaCpp])
async def test_tokens_a_chunk_change_nothing_by_chat(
    stage: Stage, dialect: type[FakeEngine], tokens_per_chunk: int
) -> None:
    engines = pair_of(dialect)
    for engine in engines:
        engine.tokens_per_chunk = tokens_per_chunk
    assert await told_over_sockets(stage, engines, BY_CHAT) == WHOLE
