"""Server-sent events: bytes to event data and back. Pure.

Follows the WHATWG HTML standard, section 9.2.6, as far as OpenAI-style streams need it: `data`
lines, comments, any line end (LF, CR, CRLF), a byte order mark, any cut of the bytes.
"""

from __future__ import annotations

DONE = b"[DONE]"
MAX_EVENT_BYTES = 16 * 1024 * 1024


class EventTooLargeError(Exception):
    """One event grew past MAX_EVENT_BYTES."""


class EventDecoder:
    """Feed bytes as they come; get the data of the events that are complete."""

    __slots__ = ("_buffer", "_data", "_size", "_skip_lf", "_started")

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[bytes] = []
        self._size = 0
        self._skip_lf = False
        self._started = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of the events that `chunk` completes; a `data` field given twice is joined by LF."""
        if self._skip_lf and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._skip_lf = False
        lines = self._lines(chunk)
        if not self._started and lines:
            lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
            self._started = True
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data, self._size = [], 0
            elif line.startswith(b"data:"):
                value = line[5:].removeprefix(b" ")
                self._size += len(value)
                if value or self._data:
                    self._data.append(value)
        if len(self._buffer) + self._size > MAX_EVENT_BYTES:
            raise EventTooLargeError(f"an event of over {MAX_EVENT_BYTES} bytes")
        return events

    def _lines(self, chunk: bytes) -> list[bytes]:
        if b"\r" in chunk:
            self._skip_lf = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = (self._buffer + chunk).split(b"\n")
        self._buffer = lines.pop()
        return lines


def event(data: bytes) -> bytes:
    """The wire form of one event."""
    return b"data: " + data + b"\n\n"
