"""Which replica a request is given to: by load and health, while settings and engines change."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import openai
import pytest

from gateway.backends import Replica
from gateway.context import GATEWAY
from gateway.reloading import RELOADER
from gateway.settings import Backend, SettingsError
from tests.gateway.fakes import FakeEngine, FakeVllm, Gate, Reset, story, writes
from tests.gateway.fakes.engines import CHAT, COMPLETIONS
from tests.gateway.fakes.http import Connection, Request
from tests.gateway.support import (
    ANSWER,
    REASONING,
    STORY,
    WAIT_S,
    Served,
    Stage,
    ask,
    get,
    leaving,
    policy_of,
    settings_of,
    stream,
    within,
)


class Pool:
    """Replicas of both roles behind one gateway."""

    def __init__(self, served: Served, large: list[FakeEngine], small: list[FakeEngine]) -> None:
        self.served = served
        self.large = large
        self.small = small

    def replicas(self, name: str = "large") -> list[Replica]:
        return self.served.app[GATEWAY].backends[name].replicas

    @property
    def active(self) -> list[int]:
        return [r.active for name in ("large", "small") for r in self.replicas(name)]

    async def busy(self) -> None:
        """Waits until something counts as running."""
        async with asyncio.timeout(WAIT_S):
            while not any(self.active):
                await asyncio.sleep(0.005)

    async def idle(self) -> None:
        """Waits until nothing counts as running; never, where a count leaks."""
        async with asyncio.timeout(WAIT_S):
            while any(self.active):
                await asyncio.sleep(0.005)

    def update(self, large: Sequence[FakeEngine], draining: Sequence[FakeEngine] = ()) -> None:
        """Other settings take effect, as they do when the file has changed."""
        backends = {
            "large": Backend(urls=_urls(large), draining=_urls(draining)),
            "small": Backend(urls=_urls(self.small)),
        }
        self.served.app[RELOADER]._update_backends(backends)


def _urls(engines: Sequence[FakeEngine]) -> tuple[str, ...]:
    return tuple(engine.url for engine in engines)


async def pool(
    stage: Stage,
    large: Sequence[FakeEngine],
    small: Sequence[FakeEngine] = (),
    settings: Mapping[str, Any] = {},
    /,
    draining: Sequence[FakeEngine] = (),
    **policy: Any,
) -> Pool:
    small = list(small) or [FakeVllm(story(*STORY), model="tiny")]
    for engine in (*large, *small):
        await stage.engine(engine)
    backends = {
        "large": {"urls": list(_urls(large)), "draining": list(_urls(draining))},
        "small": {"urls": list(_urls(small))},
    }
    served = await stage.gateway(
        {"backends": backends, **settings}, policy_of(large[0], small[0], **policy)
    )
    found = Pool(served, list(large), small)
    async with asyncio.timeout(WAIT_S):
        while any(r.info is None for name in backends for r in found.replicas(name)):
            await asyncio.sleep(0.005)
    return found


def large(count: int, *acts: Any) -> list[FakeEngine]:
    """Engines that write what they are told, or else the story."""
    script = writes(*acts) if acts else story(*STORY)
    return [FakeVllm(script, model="big") for _ in range(count)]


def counts(engines: Sequence[FakeEngine]) -> list[int]:
    return [len(engine.decodes) for engine in engines]


def running(pool: Pool, count: int) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(ask(pool.served)) for _ in range(count)]


async def arrived(engines: Sequence[FakeEngine], count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while sum(counts(engines)) < count:
            await asyncio.sleep(0.005)


def content(reply: dict[str, Any]) -> str:
    text: str = reply["choices"][0]["message"]["content"]
    return text


# ---- by load ------------------------------------------------------------------------------------


async def test_requests_that_come_at_once_are_spread(stage: Stage) -> None:
    gate = Gate()
    p = await pool(stage, large(3, gate, "Fine"))
    asked = running(p, 9)
    await arrived(p.large, 9)
    assert counts(p.large) == [3, 3, 3]
    assert p.active[:3] == [3, 3, 3]
    gate.opened.set()
    assert {content(reply) for reply in await asyncio.gather(*asked)} == {"Fine"}
    await p.idle()


async def test_the_least_loaded_is_taken(stage: Stage) -> None:
    gate = Gate()
    p = await pool(stage, large(2, gate, "Fine"))
    p.replicas()[0].active += 3
    asked = running(p, 3)
    await arrived(p.large, 3)
    assert counts(p.large) == [0, 3]
    gate.opened.set()
    await asyncio.gather(*asked)
    p.replicas()[0].active -= 3
    await p.idle()


async def test_one_that_is_back_gets_a_tenth_at_first(stage: Stage) -> None:
    gate = Gate()
    p = await pool(stage, large(2, gate, "Fine"), [], {"health": {"slow_start": 10_000}})
    p.replicas()[1].health.came_back()
    asked = running(p, 11)
    await arrived(p.large, 11)
    assert counts(p.large) == [10, 1]
    gate.opened.set()
    await asyncio.gather(*asked)


async def test_all_decodes_of_one_generation_stay_on_their_replicas(stage: Stage) -> None:
    small: list[FakeEngine] = [FakeVllm(story(*STORY), model="tiny") for _ in range(3)]
    p = await pool(stage, large(3), small)
    names = [f"question{chr(97 + n)}" for n in range(6)]
    await asyncio.gather(
        *(ask(p.served, messages=[{"role": "user", "content": name}]) for name in names)
    )
    for engines in (p.large, p.small):
        assert all(engine.decodes for engine in engines)
        for name in names:
            asked = [sum(name in text for text in engine.prompts()) for engine in engines]
            assert sorted(asked)[:2] == [0, 0], (name, asked)
            assert max(asked) >= 2


# ---- by health ----------------------------------------------------------------------------------


async def test_an_open_breaker_is_passed_over(stage: Stage) -> None:
    broken, sound = FakeVllm(writes(Reset()), model="big"), FakeVllm(writes("Fine"), model="big")
    p = await pool(stage, [broken, sound], [], {"health": {"failures": 1, "cooldown": 60}})
    for _ in range(4):
        assert content(await ask(p.served)) == "Fine"
    assert counts(p.large) == [1, 4]
    _, body = await get(p.served, "/readyz")
    assert [r["state"] for r in body["backends"]["large"]] == ["open", "up"]


async def test_it_is_tried_again_when_its_time_is_over(stage: Stage) -> None:
    broken, sound = FakeVllm(writes(Reset()), model="big"), FakeVllm(writes("Fine"), model="big")
    health = {"failures": 1, "cooldown": 0.2, "slow_start": 0}
    p = await pool(stage, [broken, sound], [], {"health": health})
    await ask(p.served)
    broken.script = writes("Back")
    async with asyncio.timeout(WAIT_S):
        while p.replicas()[0].state == "open":
            await asyncio.sleep(0.01)
    assert content(await ask(p.served)) == "Back"
    assert p.replicas()[0].state == "up"
    assert content(await ask(p.served)) == "Back"


async def test_only_one_request_tries_it(stage: Stage) -> None:
    gate = Gate()
    p = await pool(stage, large(2, gate, "Fine"), [], {"health": {"failures": 1, "cooldown": 60}})
    health = p.replicas()[0].health
    health.failed()
    health._open_until = 0.0
    asked = running(p, 6)
    await arrived(p.large, 6)
    assert counts(p.large) == [1, 5]
    gate.opened.set()
    await asyncio.gather(*asked)


async def test_with_all_breakers_open_requests_are_served(stage: Stage) -> None:
    p = await pool(stage, large(2, "Fine"), [], {"health": {"failures": 1, "cooldown": 60}})
    for replica in p.replicas():
        replica.health.failed()
        assert replica.state == "open"
    assert content(await ask(p.served)) == "Fine"


class Busy(FakeVllm):
    """Has too much to do."""

    async def answer(self, request: Request, connection: Connection) -> None:
        if self.is_decode(request.path):
            error = b'{"error": {"message": "full"}}'
            connection.whole(error, 429, **{"retry-after": "50"})
        else:
            await super().answer(request, connection)


async def test_one_that_asks_for_patience_is_asked_last(stage: Stage) -> None:
    busy, sound = Busy(model="big"), FakeVllm(writes("Fine"), model="big")
    p = await pool(stage, [busy, sound], [], {"health": {"failures": 1}})
    for _ in range(3):
        assert content(await ask(p.served)) == "Fine"
    assert counts(p.large) == [1, 3]
    assert p.replicas()[0].state == "up", "it is no failure"


async def test_a_request_passed_through_closes_the_breaker(stage: Stage) -> None:
    p = await pool(stage, large(1), [], {"health": {"failures": 3, "cooldown": 60}})
    (replica,) = p.replicas()
    for _ in range(3):
        replica.health.failed()
    assert replica.state == "open"
    await ask(p.served, model="big")
    assert replica.state == "up"
    p.large[0].refusals[CHAT] = (500, b"{}")
    for _ in range(3):
        replica.health.failed()
    with pytest.raises(openai.InternalServerError):
        await ask(p.served, model="big")
    assert replica.state == "open"
    await p.idle()


@pytest.mark.parametrize("failures", [3, 100])
async def test_a_role_that_always_fails_does_not_use_up_the_resumes(
    stage: Stage, failures: int
) -> None:
    tokens = ["<think>", *[" Now", " x", "."] * 20, "</think>", "Fine", "."]
    small: list[FakeEngine] = [FakeVllm(writes(Reset()), model="tiny")]
    engines: list[FakeEngine] = [FakeVllm(story(*tokens), model="big")]
    p = await pool(stage, engines, small, {"health": {"failures": failures}}, answer="large")
    reply = await stream(p.served, stream_options={"include_usage": True})
    assert reply.text("content") == "Fine."
    assert reply.usages[0]["relaygen"]["resumes"] == 3


# ---- before anything is decoded -----------------------------------------------------------------


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_one_that_breaks_while_the_prompt_is_made_is_passed_over(
    stage: Stage, path: str
) -> None:
    p = await pool(stage, large(2, "Fine"), [], {"health": {"failures": 2, "cooldown": 60}})
    p.large[0].refusals[path] = (500, b'{"error": {"message": "no"}}')
    for _ in range(3):
        assert content(await ask(p.served)) == "Fine"
    assert counts(p.large) == [0, 3]
    assert p.replicas()[0].state == "open"
    await p.idle()


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
@pytest.mark.parametrize("status", [400, 500])
async def test_nothing_counts_as_running_after_a_refusal(
    stage: Stage, path: str, status: int
) -> None:
    p = await pool(stage, large(1))
    p.large[0].refusals[path] = (status, b'{"error": {"message": "no"}}')
    with pytest.raises(openai.APIStatusError):
        await ask(p.served, n=3)
    assert not any(p.active)


# ---- what counts as running ---------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/tokenize", COMPLETIONS])
async def test_nothing_counts_when_the_client_has_left(stage: Stage, path: str) -> None:
    p = await pool(stage, large(2))
    for engine in p.large:
        engine.gates[path] = Gate()
    async with leaving(p.served.url, n=2):
        await p.busy()
    await p.idle()


async def test_nothing_counts_when_the_client_left_during_a_move(stage: Stage) -> None:
    broken, sound = large(1)[0], FakeVllm(story(*STORY), model="big", system="OTHER ")
    gate = Gate()
    p = await pool(stage, [broken, sound])
    broken.script = writes("<think>", "Six", Reset())
    sound.gates[COMPLETIONS] = gate
    async with leaving(p.served.url, stream=True):
        await within(WAIT_S, gate.reached.wait())
        assert p.active[:2] == [0, 1]
    await p.idle()


async def test_nothing_counts_after_everything_broke(stage: Stage) -> None:
    p = await pool(stage, large(2, "x", Reset()), [], {"resume": {"attempts": 4}})
    for n in (1, 3):
        with pytest.raises(openai.APIError):
            await ask(p.served, n=n)
    await p.idle()


# ---- draining -----------------------------------------------------------------------------------


async def test_a_draining_replica_is_given_nothing(stage: Stage) -> None:
    engines = large(2)
    p = await pool(stage, engines, draining=engines[:1])
    await asyncio.gather(*running(p, 4))
    assert counts(engines)[0] == 0
    _, body = await get(p.served, "/readyz")
    assert [r["state"] for r in body["backends"]["large"]] == ["draining", "up"]


async def test_a_draining_replica_is_better_than_none(stage: Stage) -> None:
    engines = large(1)
    p = await pool(stage, engines, draining=engines)
    assert content(await ask(p.served)) == ANSWER


def test_an_unknown_draining_url_is_named() -> None:
    backend = {"urls": ["http://a:1/v1"], "draining": ["http://b:2/v1"]}
    with pytest.raises(SettingsError, match=r"backends\.large: .*draining: http://b:2/v1 is none"):
        settings_of(backends={"large": backend})


# ---- settings that change while a generation runs -----------------------------------------------


@pytest.mark.parametrize("change", ["draining", "removed"])
async def test_what_runs_on_a_replica_goes_on_there(stage: Stage, change: str) -> None:
    gate, script = Gate(), story(*STORY)
    p = await pool(stage, large(2))
    first, second = p.large
    first.script = lambda prompt: [gate, *script(prompt)]
    asked = asyncio.create_task(stream(p.served))
    await within(WAIT_S, gate.reached.wait())
    if change == "draining":
        p.update(p.large, draining=[first])
    else:
        p.update([second])
    assert content(await ask(p.served)) == ANSWER
    others = counts(p.large)[1]
    gate.opened.set()
    reply = await within(WAIT_S, asked)
    assert (reply.text("reasoning_content"), reply.text("content")) == (REASONING, ANSWER)
    assert len(first.decodes) >= 2 and counts(p.large)[1] == others
    await p.idle()


async def test_a_replica_that_is_added_takes_over(stage: Stage) -> None:
    gate = Gate()
    p = await pool(stage, large(1, "<think>", "Six", gate, Reset()))
    asked = asyncio.create_task(stream(p.served))
    await within(WAIT_S, gate.reached.wait())
    (added,) = large(1)
    await stage.engine(added)
    p.update([added])
    async with asyncio.timeout(WAIT_S):
        while p.replicas()[0].info is None:
            await asyncio.sleep(0.005)
    gate.opened.set()
    reply = await within(WAIT_S, asked)
    assert (reply.text("reasoning_content"), reply.text("content")) == (REASONING, ANSWER)
    assert added.decodes and len(p.large[0].decodes) == 1
    await p.idle()
