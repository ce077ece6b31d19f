"""Two simulated vLLM servers that take their time, in a process of their own.

    python benchmarks/timed_engines.py --token-ms 40 --prefill-ms 300

Prints `ready LARGE_URL SMALL_URL` and serves until its stdin closes. Both write the same text, with
cues and sentence ends in it, a token at a time; a new prompt costs a prefill first.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.gateway.fakes import FakeVllm, Tokenizer, story
from tests.gateway.fakes.decode import Decode, Reply, Sink
from tests.gateway.fakes.script import ASSISTANT, Act

_THOUGHT = [*[" we", " add", " the", " next", " two", " of", " them", " up"] * 3, "."]
_EASY = [" Now", *[" that", " makes", " some", " more"] * 4, "."]
_ANSWER = ["</think>", "\n\n", "It", " is", " all", " of", " them", "."]
TRANSCRIPT = ["<think>", *(_THOUGHT + _EASY) * 3, *_ANSWER]
"""Six handoffs, and one to the answer."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds: a token, and a prompt that the engine has not seen."""

    token: float
    prefill: float


class _TimedDecode(Decode):
    """Each token has its time on the clock: a late one does not delay those after it."""

    pace: Pace
    due: float

    async def _step(self, act: Act) -> str | None:
        self.due += self.pace.token
        await asyncio.sleep(self.due - asyncio.get_running_loop().time())
        return await super()._step(act)


class TimedVllm(FakeVllm):
    def __init__(self, pace: Pace, model: str, vocabulary: Tokenizer) -> None:
        super().__init__(story(*TRANSCRIPT), model=model, tokenizer=vocabulary)
        self.pace = pace

    async def run(self, reply: Reply, acts: list[Act], sink: Sink) -> None:
        written = self.tokenizer.decode(reply.prompt).rpartition(ASSISTANT)[2]
        decode = _TimedDecode(reply, sink, self.tokenizer, self.tokens_per_chunk)
        decode.pace = self.pace
        decode.due = asyncio.get_running_loop().time() + (0 if written else self.pace.prefill)
        await decode.run(acts)
        self.requests.clear()  # thousands come


async def _serve(pace: Pace) -> None:
    vocabulary = Tokenizer()
    large, small = (TimedVllm(pace, model, vocabulary) for model in ("big", "tiny"))
    await large.start()
    await small.start()
    sys.stdout.write(f"ready {large.url} {small.url}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.buffer.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--token-ms", type=float, default=40, metavar="MS")
    parser.add_argument("--prefill-ms", type=float, default=300, metavar="MS")
    options = parser.parse_args()
    asyncio.run(_serve(Pace(options.token_ms / 1e3, options.prefill_ms / 1e3)))


if __name__ == "__main__":
    main()
