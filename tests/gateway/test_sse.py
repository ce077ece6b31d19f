"""The event decoder: any cut of the bytes, any line ends, what is no event, and the size bound."""

from __future__ import annotations

import re
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import sse
from gateway.sse import EventDecoder, EventTooLargeError

LINE = st.one_of(
    st.sampled_from([b"", b"", b"data:", b"data: ", b"data:  two blanks", b": ping", b":"]),
    st.sampled_from([b"event: x", b"id: 1", b"retry: 5", b"datum: no", b" data: no", b"data"]),
    st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=9).map(
        lambda text: b"data: " + text.encode()
    ),
)
LINE_END = st.sampled_from([b"\n", b"\r", b"\r\n"])


@st.composite
def wires(draw: st.DrawFn) -> bytes:
    """Bytes of a stream, its end possibly missing."""
    lines = draw(st.lists(st.tuples(LINE, LINE_END), max_size=16))
    mark = draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))
    return mark + b"".join(line + end for line, end in lines)


def oracle(wire: bytes) -> list[bytes]:
    """The events of a whole stream, by the standard's words; empty ones are no events to us."""
    *lines, _ = re.split(rb"\r\n|\r|\n", wire.removeprefix(b"\xef\xbb\xbf"))
    events, data = [], []
    for line in lines:
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line:
            events.append(b"\n".join(data).lstrip(b"\n"))
            data = []
    return [event for event in events if event]


def cut(wire: bytes, places: list[int]) -> list[bytes]:
    at = sorted({min(place, len(wire)) for place in places})
    return [wire[a:b] for a, b in zip([0, *at], [*at, len(wire)], strict=True)]


def decode(chunks: list[bytes]) -> list[bytes]:
    decoder = EventDecoder()
    return [event for chunk in chunks for event in decoder.feed(chunk)]


@given(wires(), st.lists(st.integers(0, 200), max_size=12))
def test_any_cut_of_the_bytes_gives_the_same_events(wire: bytes, places: list[int]) -> None:
    assert decode(cut(wire, places)) == oracle(wire)


@given(wires())
def test_byte_by_byte_gives_the_same_events(wire: bytes) -> None:
    assert decode([wire[i : i + 1] for i in range(len(wire))]) == oracle(wire)


@given(st.lists(st.binary(min_size=1).filter(lambda data: not re.search(rb"[\r\n]", data))))
def test_what_is_written_is_read_back(data: list[bytes]) -> None:
    assert decode([b"".join(map(sse.event, data))]) == data


@pytest.mark.parametrize("cut_at", range(len("data: A\r\n\r\n") + 1))
def test_an_event_is_out_at_its_first_possible_byte(cut_at: int) -> None:
    wire = b"data: A\r\n\r\n"
    decoder = EventDecoder()
    first = decoder.feed(wire[:cut_at])
    assert first == ([b"A"] if cut_at >= len(b"data: A\r\n\r") else [])
    assert first + decoder.feed(wire[cut_at:]) == [b"A"]


def test_a_character_cut_in_two_stays_whole() -> None:
    wire = 'data: {"text":"北"}\n\n'.encode()
    at = wire.index("北".encode()) + 1
    assert decode([wire[:at], wire[at:]]) == ['{"text":"北"}'.encode()]


def test_an_event_may_have_several_lines() -> None:
    assert decode([b"data: a\ndata: b\n\n"]) == [b"a\nb"]


@pytest.mark.parametrize("noise", [b":\n\n", b": ping\n", b"data:\n\n", b"data: \n\n", b"\n\n"])
def test_noise_between_events_is_swallowed(noise: bytes) -> None:
    assert decode([b"data: a\n\n" + noise + b"data: b\n\n"]) == [b"a", b"b"]


def test_a_byte_order_mark_is_not_data() -> None:
    assert decode([b"\xef", b"\xbb\xbfdata: a\n", b"\n"]) == [b"a"]


@pytest.mark.parametrize("line", [b"x", b"data:\n", b"data: x\n", b"data: x\r"])
def test_an_endless_event_is_refused(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    decoder = EventDecoder()
    decoder.feed(b"data: x\n")
    with pytest.raises(EventTooLargeError):
        for _ in range(1002):
            decoder.feed(line)


def test_many_small_events_are_not_one_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    assert len(decode([b"data: 12345678\n\n"] * 50)) == 50


@pytest.mark.timeout(60)  # far less, or hours where the line is copied for each chunk
def test_a_line_of_very_many_chunks_takes_no_longer_than_one_of_few() -> None:
    decoder = EventDecoder()
    decoder.feed(b"data: ")
    for _ in range(300_000):
        assert not decoder.feed(b"x" * 32)
    assert decoder.feed(b"\n\n") == [b"x" * 32 * 300_000]


@pytest.mark.parametrize("line", [b"data: 12\n", b"data: x\ndata:\n", b"x"])
def test_what_is_unfinished_takes_little_more_room_than_its_bytes(line: bytes) -> None:
    tracemalloc.start()
    try:
        decoder = EventDecoder()
        for _ in range(20_000):
            decoder.feed(line)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 2 * 20_000 * len(line)


@pytest.mark.parametrize("line", [b": x\n", b"event: x\n", b"id: 1\r\n", b"other: x\r"])
def test_lines_that_are_no_data_leave_nothing_behind(
    line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    decoder = EventDecoder()
    decoder.feed(b"data: a\n")
    for _ in range(1000):
        assert decoder.feed(line) == []
    assert decoder.feed(b"\n\n") == [b"a"]
