"""Two simulated vLLM servers in one process: as fast as they are told to be, and never slower.

    python -m gateway.bench.engine --tokens 600 --large-run 30 --small-run 20 --token-ms 25,4

Prints `ready LARGE_URL SMALL_URL` and serves until its stdin closes. Both write the same text and
go on with it from whatever prefix they are sent. With --prefill-us they remember prompts, and one
that they do not know takes its time; with --slowdown each stream slows down the others, as in a
batch. GET /stats tells what they did.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections import defaultdict
from functools import lru_cache, partial
from typing import Any, cast

import orjson

from gateway.bench.prefixes import PrefixCache
from gateway.bench.script import Script, ending

HOST = "127.0.0.1"
_LENGTH = re.compile(rb"content-length: *(\d+)", re.I)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_MAX_HANDOFFS = 100_000
_TEXTS = 64
"""Prompts that are not tokenized again."""


class Clock:
    """One timer for all streams that have a token due in the same millisecond."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: defaultdict[int, list[Stream]] = defaultdict(list)

    def wake(self, stream: Stream, at: float) -> None:
        tick = int(at * 1000) + 1
        waiting = self._due[tick]
        if not waiting:
            self._loop.call_at(tick / 1000, self._ring, tick)
        waiting.append(stream)

    def _ring(self, tick: int) -> None:
        for stream in self._due.pop(tick):
            stream.write_due()


class Stats:
    """Counts, and seconds from a segment's last token to the request that goes on after it."""

    def __init__(self) -> None:
        self.tokens = self.decodes = self.aborted = self.prefilled = self.cached = 0
        self.running = [0, 0]
        self.handoffs: list[float] = []
        self.ended: dict[tuple[int, ...], float] = {}


class Simulation:
    def __init__(self, options: argparse.Namespace) -> None:
        runs = (options.large_run, options.small_run)
        self.script = Script(options.tokens, *runs, numbers=options.numbers)
        self.token_s: list[float] = [ms / 1e3 for ms in options.token_ms]
        self.first_s: list[float] = [ms / 1e3 for ms in options.first_ms]
        self.prefill_s: list[float] = [us / 1e6 for us in options.prefill_us]
        self.slowdown: float = options.slowdown / 100
        self.batch: int = options.batch
        self.prefixes = (PrefixCache(), PrefixCache())
        self._encoded = lru_cache(maxsize=_TEXTS)(self.script.vocabulary.encode)
        self.stats = Stats()
        self.clock = Clock()

    def pace(self, role: int) -> float:
        """Seconds a token at the present load."""
        return self.token_s[role] * (1 + self.slowdown * (self.stats.running[role] - 1))

    def prefill(self, role: int, ids: list[int]) -> float:
        """Seconds until the first token."""
        if not any(self.prefill_s):
            return self.first_s[role]
        cached = self.prefixes[role].add(ids)
        self.stats.cached += cached
        self.stats.prefilled += len(ids) - cached
        return self.first_s[role] + self.prefill_s[role] * (len(ids) - cached)

    def keep(self, role: int, prompt: list[int], start: int, end: int) -> None:
        """Remembers what was written after a prompt."""
        if any(self.prefill_s):
            self.prefixes[role].add([*prompt, *self.script.ids[start:end]])

    def prompt(self, messages: object) -> list[int]:
        return self._encoded(f"user {messages} assistant")

    def chat_prompt(self, messages: object) -> list[int]:
        """For decodes: empty where nothing depends on it, as tokenizing takes a while."""
        return self.prompt(messages) if any(self.prefill_s) else []

    def told(self) -> dict[str, object]:
        stats = self.stats
        handoffs, stats.handoffs = stats.handoffs, []
        return {
            "tokens": stats.tokens,
            "decodes": stats.decodes,
            "aborted": stats.aborted,
            "running": sum(stats.running),
            "prefilled": stats.prefilled,
            "cached": stats.cached,
            "handoff_ms": [round(s * 1e3, 4) for s in handoffs],
        }


class Stream:
    """One decode being written. `start` is the script's first token that `prompt` lacks."""

    def __init__(
        self, server: Server, prompt: list[int], start: int, most: int | None, *, chat: bool
    ) -> None:
        simulation, self._role = server.simulation, server.role
        self._server, self._simulation = server, simulation
        self._frames = simulation.script.chats if chat else simulation.script.completions
        self._chat = chat
        self._prompt = prompt
        self._start = self._at = start
        self._stop = min(start + most, len(self._frames)) if most else len(self._frames)
        self._whole = self._stop == len(self._frames)
        self._paced = bool(simulation.token_s[self._role])
        self._loop_time = asyncio.get_running_loop().time
        self._due = self._loop_time() + simulation.prefill(self._role, prompt)
        self._key = tuple(prompt[: len(prompt) - start])
        self.left = False

    def begin(self) -> None:
        self._simulation.stats.running[self._role] += 1
        self._server.write(_STREAM_HEAD)
        if self._due > self._loop_time():
            self._simulation.clock.wake(self, self._due)
        else:
            self.write_due()

    def write_all(self) -> None:
        """As much as the connection takes; called again when it takes more."""
        frames, batch = self._frames, self._simulation.batch
        while self._at < self._stop and self._server.takes and not self.left:
            end = min(self._at + batch, self._stop)
            self._server.write(_chunked(b"".join(frames[self._at : end])))
            self._simulation.stats.tokens += end - self._at
            self._at = end
        if self._at == self._stop and not self.left:
            self._finish()

    def write_due(self) -> None:
        """All tokens whose time has come; each has its own place on the clock."""
        if self.left:
            return
        if not self._paced:
            self.write_all()
            return
        now, simulation = self._loop_time(), self._simulation
        pace = simulation.pace(self._role)
        while self._due <= now and self._at < self._stop:
            self._server.write(_chunked(self._frames[self._at]))
            if self._at in simulation.script.ends:
                simulation.stats.ended[(*self._key, self._at + 1)] = time.perf_counter()
            simulation.stats.tokens += 1
            self._at += 1
            self._due += pace
        if self._at == self._stop:
            self._finish()
        else:
            simulation.clock.wake(self, self._due)

    def leave(self) -> None:
        """Writes no more."""
        self.left = True
        self._simulation.stats.running[self._role] -= 1
        self._simulation.keep(self._role, self._prompt, self._start, self._at)

    def _finish(self) -> None:
        self.leave()
        reason = "stop" if self._whole else "length"
        last = ending(chat=self._chat, tokens=self._at - self._start, reason=reason)
        self._server.write(_chunked(last) + b"0\r\n\r\n")


class Server(asyncio.Protocol):
    """One connection to the engine of one role."""

    def __init__(self, simulation: Simulation, role: int) -> None:
        self.simulation = simulation
        self.takes = True
        self.role = role
        self._arrived = 0.0
        self._buffer = bytearray()
        self._stream: Stream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.write = self._transport.write

    def connection_lost(self, error: Exception | None) -> None:
        if self._stream is not None and not self._stream.left:
            self._stream.leave()
            self.simulation.stats.aborted += 1

    def pause_writing(self) -> None:
        self.takes = False

    def resume_writing(self) -> None:
        self.takes = True
        if self._stream is not None and not self.simulation.token_s[self.role]:
            self._stream.write_all()

    def data_received(self, data: bytes) -> None:
        if not self._buffer:
            self._arrived = time.perf_counter()
        self._buffer += data
        while (head := self._buffer.find(b"\r\n\r\n")) >= 0:
            told = _LENGTH.search(self._buffer, 0, head)
            end = head + 4 + (int(told.group(1)) if told else 0)
            if len(self._buffer) < end:
                return
            path = self._buffer[:head].split(b" ", 2)[1].decode()
            body = bytes(self._buffer[head + 4 : end])
            del self._buffer[:end]
            self._handle(path, orjson.loads(body) if body else {})

    def _handle(self, path: str, body: dict[str, Any]) -> None:
        if path in ("/v1/completions", "/v1/chat/completions"):
            self._decode(body, chat=path == "/v1/chat/completions")
            return
        answer = self._answer(path, body)
        status = b"404 Not Found" if answer is None else b"200 OK"
        content = orjson.dumps(answer or {"detail": "Not Found"})
        head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self.write(head % (status, len(content)) + content)

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        vocabulary = self.simulation.script.vocabulary
        match path:
            case "/version":
                return {"version": "0.11.0"}
            case "/v1/models":
                model = {"id": NAMES[self.role], "owned_by": "vllm", "max_model_len": 1 << 20}
                return {"object": "list", "data": [model]}
            case "/tokenize":
                messages = body.get("messages")
                ids = self.simulation.prompt(messages) if messages else None
                tokens = vocabulary.encode(body["prompt"]) if ids is None else ids
                return {"count": len(tokens), "max_model_len": 1 << 20, "tokens": tokens}
            case "/detokenize":
                return {"prompt": vocabulary.decode(body["tokens"])}
            case "/health":  # asked by routers
                return {"status": "ok"}
            case "/stats":
                return self.simulation.told()
        return None

    def _decode(self, body: dict[str, Any], *, chat: bool) -> None:
        stats, start = self.simulation.stats, 0
        stats.decodes += 1
        if chat:
            prompt = self.simulation.chat_prompt(body["messages"])
        else:
            prompt = body["prompt"]
            start = self._written(prompt)
            ended = stats.ended.pop((*prompt[: len(prompt) - start], start), None)
            if ended is not None and len(stats.handoffs) < _MAX_HANDOFFS:
                stats.handoffs.append(self._arrived - ended)
        most = body.get("max_tokens") or body.get("max_completion_tokens")
        self._stream = Stream(self, prompt, start, most, chat=chat)
        self._stream.begin()

    def _written(self, prompt: list[int]) -> int:
        """How much of the script follows the prompt: its first token is in no prompt."""
        first = self.simulation.script.ids[0]
        return len(prompt) - prompt.index(first) if first in prompt else 0


NAMES = ("simulated-large", "simulated-small")


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _serve(options: argparse.Namespace) -> None:
    loop, simulation = asyncio.get_running_loop(), Simulation(options)
    urls = []
    for role in range(2):
        server = await loop.create_server(partial(Server, simulation, role), HOST, 0)
        urls.append(f"http://{HOST}:{server.sockets[0].getsockname()[1]}")
    sys.stdout.write(f"ready {' '.join(urls)}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.buffer.read)


def two(text: str) -> list[float]:
    """The large model's number and the small one's."""
    large, _, small = text.partition(",")
    return [float(large), float(small or large)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=600, help="of the thinking")
    parser.add_argument("--large-run", type=int, default=0, help="tokens of a large segment")
    parser.add_argument("--small-run", type=int, default=0, help="tokens of a small segment")
    parser.add_argument("--numbers", type=int, default=0, help="1: sentences end in numbers")
    parser.add_argument("--token-ms", type=two, default=[0, 0], metavar="LARGE[,SMALL]")
    parser.add_argument("--first-ms", type=two, default=[0, 0], metavar="LARGE[,SMALL]")
    parser.add_argument(
        "--prefill-us",
        type=two,
        default=[0, 0],
        metavar="LARGE[,SMALL]",
        help="a token of the prompt that it does not know",
    )
    parser.add_argument(
        "--slowdown", type=float, default=0, metavar="PERCENT", help="by each other stream"
    )
    parser.add_argument(
        "--batch", type=int, default=16, help="tokens a write, where they take no time"
    )
    options = parser.parse_args()
    from gateway.server import loop_factory

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(options))


if __name__ == "__main__":
    main()
