"""The comparison asks fairly, and reads replies as engines and the gateway send them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from openai import APIStatusError

from gateway.demo.__main__ import main
from gateway.demo.ask import Fragment, Target, ask
from gateway.demo.compare import Plan, compare, walk
from gateway.demo.problems import problems
from gateway.demo.result import Mode


@pytest.mark.parametrize("count", [1, 2, 3, 20, 24])
def test_every_mode_gets_every_problem_once(count: int) -> None:
    steps = list(walk(count))
    assert len(set(steps)) == len(steps) == 3 * count


@pytest.mark.parametrize("count", [20, 24, 100])
def test_a_problem_comes_back_only_after_many_others(count: int) -> None:
    last: dict[int, int] = {}
    for step, (_, index) in enumerate(walk(count)):
        assert step - last.get(index, -count) >= count - 3
        last[index] = step


def test_the_modes_take_turns() -> None:
    modes = [mode for mode, _ in walk(9)]
    for turn in range(9):
        assert set(modes[3 * turn : 3 * turn + 3]) == set(Mode)


# ---- against a server that speaks the wire format -----------------------------------------------

_ANSWERS = {p.question: p.expected for p in problems(40, seed=9)}


class _Server:
    """An OpenAI-compatible server; `direct` puts the thinking in `content`, as engines do."""

    def __init__(self, direct: bool, wrong: bool = False) -> None:
        self.direct, self.wrong = direct, wrong
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if body["model"] == "none":
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        result = _ANSWERS[body["messages"][0]["content"]] + self.wrong
        for chunk in self._chunks(result):
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _chunks(self, result: int) -> Iterable[dict[str, Any]]:
        yield _chunk({"role": "assistant", "content": ""})
        if self.direct:
            yield _chunk({"content": "<think>\nIt is 7.\n</think>\n\n"})
        else:
            yield _chunk({"reasoning_content": "It is"}, relaygen={"role": "large", "segment": 0})
            yield _chunk({"reasoning_content": " 7."}, relaygen={"role": "small", "segment": 1})
        yield _chunk({"content": f"It is {result}."})
        yield _chunk({}, finish="stop")
        yield {"id": "1", "object": "chat.completion.chunk", "choices": [], "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": 5, "completion_tokens": 10, "total_tokens": 15}
        if not self.direct:
            usage["relaygen"] = {
                "policy": "p", "large_tokens": 6, "small_tokens": 4, "discarded_tokens": 1,
                "segments": 3, "handoffs": 2, "large_utilization": 0.6, "handoff_ms_p50": 2.5,
            }  # fmt: skip
        return usage


def _chunk(delta: dict[str, Any], finish: str | None = None, **extra: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "1", "object": "chat.completion.chunk", "choices": [choice], **extra}


@asynccontextmanager
async def _serving(server: _Server) -> AsyncIterator[_Server]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()


@pytest.fixture
async def servers() -> AsyncIterator[tuple[_Server, _Server, _Server]]:
    async with (
        _serving(_Server(direct=True)) as large,
        _serving(_Server(direct=True, wrong=True)) as small,
        _serving(_Server(direct=False)) as relay,
    ):
        yield large, small, relay


def _plan(servers: tuple[_Server, _Server, _Server], **options: Any) -> Plan:
    large, small, relay = servers
    return Plan(
        Target(large.url, "l"), Target(small.url, "s"), Target(relay.url, "p"), seed=9, **options
    )


async def test_each_mode_is_graded_and_counted_by_role(
    servers: tuple[_Server, _Server, _Server],
) -> None:
    heard: list[tuple[Mode, bool]] = []
    found = await compare(_plan(servers, count=6), lambda m, _, right: heard.append((m, right)))
    assert (found.large.right, found.small.right, found.relay.right) == (6, 0, 6)
    assert (found.large.large_tokens, found.large.small_tokens) == (60, 0)
    assert (found.small.large_tokens, found.small.small_tokens) == (0, 60)
    assert (found.relay.large_tokens, found.relay.small_tokens) == (36, 24)
    assert (found.relay.handoffs, found.relay.handoff_ms_p50) == (12, 2.5)
    assert sorted(heard) == sorted((m, m is not Mode.SMALL) for m in Mode for _ in range(6))
    assert [each.question for each in found.graded] == [p.question for p in problems(6, 9)]


async def test_every_mode_is_asked_the_same_way(
    servers: tuple[_Server, _Server, _Server],
) -> None:
    await compare(_plan(servers, count=3, max_tokens=77))
    for server in servers:
        assert len(server.bodies) == 4  # one to warm up
        for body in server.bodies:
            assert (body["temperature"], body["max_tokens"], body["stream"]) == (0, 77, True)
            assert "cache_salt" not in body


async def test_a_cache_salt_is_each_modes_own(servers: tuple[_Server, _Server, _Server]) -> None:
    await compare(_plan(servers, count=1, cache_salt=True))
    salts = [{body["cache_salt"] for body in server.bodies} for server in servers]
    assert salts == [{"demo-large"}, {"demo-small"}, {"demo-relay"}]


async def test_fragments_carry_role_segment_and_reasoning(
    servers: tuple[_Server, _Server, _Server],
) -> None:
    target = Target(servers[2].url, "p")
    seen: list[Fragment] = []
    question = next(iter(_ANSWERS))
    async with target.client() as client:
        reply = await ask(client, target, question, on_text=seen.append, relaygen={"trace": True})
    assert seen == [
        Fragment("It is", True, "large", 0),
        Fragment(" 7.", True, "small", 1),
        Fragment(f"It is {_ANSWERS[question]}.", False),
    ]
    assert (reply.reasoning, reply.finish_reason) == ("It is 7.", "stop")
    assert 0 < reply.first_s <= reply.end_s <= reply.wall_s
    assert servers[2].bodies[0]["relaygen"] == {"trace": True}


async def test_a_servers_refusal_is_raised(servers: tuple[_Server, _Server, _Server]) -> None:
    target = Target(servers[0].url, "none")
    async with target.client() as client:
        with pytest.raises(APIStatusError, match="no such model"):
            await ask(client, target, "q")


async def test_the_command_compares_running_servers(
    servers: tuple[_Server, _Server, _Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large, small, relay = servers
    file = tmp_path / "found.json"
    flags = ["--large", large.url, "l", "--small", small.url, "s", "--relay", relay.url, "p"]
    flags += ["--problems", "3", "--seed", "9", "--markdown", "--json", str(file)]
    assert await asyncio.to_thread(main, flags) == 0
    assert "| relay | 3/3 |" in capsys.readouterr().out
    assert json.loads(file.read_text())["modes"]["small"]["right"] == 0


async def test_the_command_tells_a_servers_refusal(
    servers: tuple[_Server, _Server, _Server], capsys: pytest.CaptureFixture[str]
) -> None:
    url = servers[0].url
    flags = ["--large", url, "none", "--small", url, "s", "--relay", url, "p", "--seed", "9"]
    assert await asyncio.to_thread(main, flags) == 1
    assert "no such model" in capsys.readouterr().err
