"""Server-sent events: bytes to event data and back. Pure.

Follows the WHATWG HTML standard, section 9.2.6, as far as OpenAI-style streams need it: `data`
lines, comments, any line end (LF, CR, CRLF), a byte order mark, any cut of the bytes.
"""

from __future__ import annotations

DONE = b"[DONE]"
# vLLM's first chunk has the ids of the whole prompt: a million of them at about 8 bytes each. Other
# events have some KiB. The bound is one stream's: 500 broken ones at once may take 5 GiB.
MAX_EVENT_BYTES = 10 * 1024 * 1024


_SHORT = 4096
"""Of an unfinished line: so much may be copied with each chunk that goes on with it."""


class EventTooLargeError(Exception):
    """One event grew past MAX_EVENT_BYTES."""


class EventDecoder:
    """Feed bytes as they come; get the data of the events that are complete.

    Takes time linear in the bytes, however they are cut, and keeps no more than MAX_EVENT_BYTES
    and the last chunk: an unfinished line and an unfinished event.
    """

    __slots__ = ("_data", "_line", "_skip_lf", "_started")

    def __init__(self) -> None:
        # Grown in place where there is more than one part: joined anew each time, a line of many
        # small chunks would take time quadratic in its length.
        self._line = bytearray()
        self._data: bytes | bytearray = b""
        self._skip_lf = False
        self._started = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of the events that `chunk` completes; a `data` field given twice is joined by LF."""
        if (usual := self._usual(chunk)) is not None:
            return usual
        if self._skip_lf and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._skip_lf = False
        lines = self._lines(chunk)
        if not self._started and lines:
            lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
            self._started = True
        events, data = [], self._data
        for line in lines:
            if not line:
                if data:
                    events.append(data if type(data) is bytes else bytes(data))
                    data = b""
            elif line.startswith(b"data:"):
                value = line[5:].removeprefix(b" ")
                data = _joined(data, value) if data else value
        self._data = data
        if len(self._line) + len(data) > MAX_EVENT_BYTES:
            raise EventTooLargeError(f"an event of over {MAX_EVENT_BYTES} bytes")
        return events

    def _usual(self, chunk: bytes) -> list[bytes] | None:
        """All at once, where the chunk ends nothing but events of one `data` line each.

        None, and nothing done, where it may be otherwise.
        """
        if self._data or self._skip_lf or len(self._line) > _SHORT or b"\r" in chunk:
            return None
        whole = bytes(self._line) + chunk if self._line else chunk
        end = whole.rfind(b"\n\n")
        rest = end + 2
        if end < 0 or not whole.startswith(b"data: ") or whole.find(b"\n", rest) >= 0:
            return None
        events = whole[6:end].split(b"\n\ndata: ")
        if whole.count(b"\n", 0, end) != 2 * len(events) - 2 or not all(events):
            return None
        self._line = bytearray(whole[rest:])
        self._started = True
        return events

    def _lines(self, chunk: bytes) -> list[bytes]:
        """The lines that `chunk` completes."""
        if b"\r" in chunk:
            self._skip_lf = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = chunk.split(b"\n")
        rest = lines.pop()
        if self._line and lines:
            self._line += lines[0]
            lines[0] = bytes(self._line)
            self._line = bytearray()
        if rest:
            self._line += rest
        return lines


def _joined(data: bytes | bytearray, value: bytes) -> bytearray:
    """Grows in place from the second line on."""
    grown = data if isinstance(data, bytearray) else bytearray(data)
    grown += b"\n"
    grown += value
    return grown


def event(data: bytes) -> bytes:
    """The wire form of one event."""
    return b"data: " + data + b"\n\n"
