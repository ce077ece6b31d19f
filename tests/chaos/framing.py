"""Where an HTTP/1.1 message ends: as much of the protocol as a proxy needs to know it."""

from __future__ import annotations

_END_OF_HEAD = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class Message:
    """A request or an answer, fed as it passes. `seen` counts its bytes, the head's included."""

    def __init__(self) -> None:
        self.seen = 0
        self.start = ""
        """The request line, or the status line, once the head is there."""
        self.body = bytearray()
        self._head = b""
        self._length: int | None = 0

    def feed(self, data: bytes) -> None:
        self.seen += len(data)
        if not self.start:
            head, found, data = (self._head + data).partition(_END_OF_HEAD)
            if not found:
                self._head = head
                return
            self._read(head.decode("latin-1"))
        self.body += data

    def _read(self, head: str) -> None:
        self.start, *lines = head.split("\r\n")
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        chunked = "chunked" in headers.get("transfer-encoding", "")
        self._length = None if chunked else int(headers.get("content-length", "0"))

    @property
    def done(self) -> bool:
        if not self.start:
            return False
        if self._length is not None:
            return len(self.body) >= self._length
        return self.body == _LAST_CHUNK or self.body.endswith(b"\r\n" + _LAST_CHUNK)

    @property
    def path(self) -> str:
        """A request's."""
        return self.start.split(" ")[1] if self.start else ""
