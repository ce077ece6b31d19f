"""Load from a process of its own: streams that are read as fast as they come.

    python -m gateway.bench.load --url http://127.0.0.1:8080 --model pair --streams 32 --requests 4

Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

_FIRST = re.compile(rb'(?:content|text)":"[^"]')
_HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n"
)
_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
_END = b"\r\n0\r\n\r\n"
_STREAM = re.compile(rb"HTTP/1.1 200 .*?\r\ncontent-type: *text/event-stream", re.I | re.S)
_HEAD_END = b"\r\n\r\n"
_SHOWN = 300


class Client(asyncio.Protocol):
    """One connection: its requests one after the other."""

    def __init__(self, number: int, options: argparse.Namespace) -> None:
        self._number = number
        self._options = options
        self._left = options.requests
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first_s: list[float] = []
        self.total_s: list[float] = []
        self.gaps_s: list[float] = []
        self.errors = self.frames = self.tokens = self.size = 0
        self.refused = ""
        """The first answer that was no stream."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        content = f"Question {self._number}-{self._left}" + " word" * self._options.prompt
        message = {"role": "user", "content": content}
        body: dict[str, Any] = {"model": self._options.model, "stream": True, "messages": [message]}
        body["stream_options"] = {"include_usage": True}
        if self._options.logprobs:
            body |= {"logprobs": True, "top_logprobs": self._options.logprobs}
        if self._options.max_tokens:
            body["max_tokens"] = self._options.max_tokens
        if self._options.mode:
            body["relaygen"] = {"mode": self._options.mode}
        data = json.dumps(body).encode()
        self._seen = b""
        self._begun = self._is_stream = False
        self._sent = self._last = time.perf_counter()
        self._transport.write(_HEAD % (self._options.key.encode(), len(data)) + data)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._is_stream and not self._accepts(data):
            return
        if self._begun:
            self.gaps_s.append(now - self._last)
        elif _FIRST.search(self._seen + data):
            self._begun = True
            self.first_s.append(now - self._sent)
        self._last = now
        self.frames += data.count(b"data: {")
        self.size += len(data)
        if b'data: {"error"' in data:
            self.errors += 1
        self._seen = (self._seen + data)[-4096:]
        if self._seen.endswith(_END):
            self._ended(now)

    def _accepts(self, data: bytes) -> bool:
        """Whether a stream began; one that is refused ends this client's requests."""
        head = self._seen + data
        if _HEAD_END not in head:
            self._seen = head
            return False
        self._is_stream = bool(_STREAM.match(head))
        if not self._is_stream:
            self.refused = head.decode(errors="replace")[:_SHOWN]
            self._transport.close()
        return self._is_stream

    def _ended(self, now: float) -> None:
        if b"data: [DONE]" not in self._seen:
            self.errors += 1
        if told := _TOKENS.findall(self._seen):
            self.tokens += int(told[-1])
        self.total_s.append(now - self._sent)
        self._left -= 1
        if self._left:
            self._ask()
        else:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.errors += self._left
        self.done.set_result(None)


async def _run(options: argparse.Namespace) -> dict[str, Any]:
    loop, address = asyncio.get_running_loop(), urlsplit(options.url)
    clients = [Client(number, options) for number in range(options.streams)]
    start = time.perf_counter()
    for client in clients:
        await loop.create_connection(partial(_itself, client), address.hostname, address.port)
        if options.spread:
            await asyncio.sleep(options.spread / options.streams)
    await asyncio.gather(*(client.done for client in clients))
    gaps = sorted(gap for client in clients for gap in client.gaps_s)
    return {
        "seconds": time.perf_counter() - start,
        "errors": sum(client.errors for client in clients),
        "refused": next((client.refused for client in clients if client.refused), ""),
        "frames": sum(client.frames for client in clients),
        "tokens": sum(client.tokens for client in clients),
        "bytes": sum(client.size for client in clients),
        "first_ms": [s * 1e3 for client in clients for s in client.first_s],
        "total_ms": [s * 1e3 for client in clients for s in client.total_s],
        "gap_ms": {str(q): _quantile(gaps, q) * 1e3 for q in (50, 99, 100)},
    }


def _itself(client: Client) -> Client:
    return client


def _quantile(ordered: list[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", required=True, help="without /v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--requests", type=int, default=1, help="of each stream")
    parser.add_argument("--key", default="-", help="the API key")
    parser.add_argument("--max-tokens", type=int, default=0, help="of each reply")
    parser.add_argument("--spread", type=float, default=0, help="seconds until the last begins")
    parser.add_argument("--prompt", type=int, default=0, help="words of it, besides a few")
    parser.add_argument("--logprobs", type=int, default=0, help="alternatives a token")
    parser.add_argument("--mode", choices=("large", "small"), help="one model alone")
    options = parser.parse_args()
    from gateway.server import loop_factory

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        json.dump(runner.run(_run(options)), sys.stdout)


if __name__ == "__main__":
    main()
