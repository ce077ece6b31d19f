"""The event decoder against a slow, plainly written one; any bytes, any cuts."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from gateway.sse import EventDecoder
from tests.fuzz.support import SECONDS, fuzz

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(10 * SECONDS + 300)]

WIRES = st.lists(
    st.sampled_from(
        [
            b"data: a\n",
            b"data:b\r\n",
            b"data:\n",
            b"\n",
            b"\r",
            b"\r\n",
            b": c\n",
            b"event: d\n",
            b"\xef\xbb\xbf",
            b"data",
            b":",
            b" ",
            b"dat",
            b"id: 1\r",
            b"data:  x\r",
            b"datax: y\n",
        ]
    )
    | st.binary(max_size=8),
    max_size=40,
).map(b"".join)


def plain(wire: bytes) -> list[bytes]:
    """A character at a time, as the standard tells it; events without data are none to us."""
    wire = wire.removeprefix(b"\xef\xbb\xbf")
    events, data, line, at = [], list[bytes](), bytearray(), 0
    while at < len(wire):
        if wire[at] not in b"\r\n":
            line.append(wire[at])
            at += 1
            continue
        at += 2 if wire[at : at + 2] == b"\r\n" else 1
        field, colon, value = bytes(line).partition(b":")
        if not line:
            events.append(b"\n".join(data).lstrip(b"\n"))
            data = []
        elif field == b"data" and colon:
            data.append(value.removeprefix(b" "))
        line = bytearray()
    return [event for event in events if event]


def test_any_bytes_in_any_cut() -> None:
    def check(wire: bytes, places: list[int]) -> None:
        at = sorted({place % (len(wire) + 1) for place in places})
        decoder = EventDecoder()
        found = [
            event
            for a, b in zip([0, *at], [*at, len(wire)], strict=True)
            for event in decoder.feed(wire[a:b])
        ]
        assert found == plain(wire)

    fuzz(check, WIRES, st.lists(st.integers(0, 400), max_size=30))
