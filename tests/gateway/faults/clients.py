"""Scenes of clients that leave, stall, send nonsense or ask for too much."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.context import GATEWAY
from tests.gateway.fakes import FakeVllm, Gate, silence, writes
from tests.gateway.faults.play import Play, big, scene
from tests.gateway.faults.rows import Cut, Gone, Refused, Seen
from tests.gateway.support import WAIT_S, leaving, within
from tests.gateway.test_listening import FLOOD, HEAD, SOON, asked, wire

# ---- leaving and stalling -----------------------------------------------------------------------


@scene
async def leaves(play: Play) -> Seen:
    served = await play.serve([large := big(writes("<think>", gate := silence()))])
    async with leaving(served.url, stream=True):
        await within(WAIT_S, gate.reached.wait())
    await within(WAIT_S, large.decodes[0].left.wait())
    return Gone()


@scene
async def stops_reading(play: Play) -> Seen:
    large = FakeVllm(writes(*FLOOD, silence()), model="big", context=1_000_000)
    small = FakeVllm(model="tiny", context=1_000_000)
    served = await play.serve([large], [small], settings=SOON)
    async with wire(served, receive=4096) as client:
        client.send(asked(stream=True))
        await within(WAIT_S, (await large.decode()).left.wait())
        assert b"[DONE]" not in await client.rest()
    return Cut()


# ---- bodies that can't be read ------------------------------------------------------------------


async def _sent(play: Play, data: bytes, **settings: Any) -> Seen:
    served = await play.serve([big()], settings=settings)
    async with wire(served) as client:
        client.send(data)
        answer = await client.answer()
        return Refused(answer.status, answer.error["code"])


@scene
async def body_too_large(play: Play) -> Seen:
    return await _sent(play, HEAD + b"Content-Length: 2000000\r\n\r\n", limits={"body_mib": 1})


@scene
async def body_too_slow(play: Play) -> Seen:
    return await _sent(play, HEAD + b"Content-Length: 9999\r\n\r\n{", **SOON)


@scene
async def body_broken(play: Play) -> Seen:
    return await _sent(play, HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}")


@scene
async def no_http(play: Play) -> Seen:
    return await _sent(play, b"hello there\r\n\r\n")


# ---- keys and limits ----------------------------------------------------------------------------


@scene
async def wrong_key(play: Play) -> Seen:
    await play.serve([big()], settings={"api_keys": ["right"]})
    return await play.ask(key="wrong")


@scene
async def not_for_this_key(play: Play) -> Seen:
    await play.serve([big()], settings={"api_keys": [{"key": "any", "policies": ["another"]}]})
    return await play.ask()


async def _beside_another(play: Play, waiting: int = 0, **settings: Any) -> Seen:
    """Asks while one generation runs, and so many requests wait."""
    gate, tell = Gate(), big().script
    served = await play.serve([big(lambda prompt: [gate, *tell(prompt)])], settings=settings)
    async with play.asked(gate):
        others = [play.beside(play.ask()) for _ in range(waiting)]
        async with asyncio.timeout(WAIT_S):
            while served.app[GATEWAY].admission.waiting < waiting:
                await asyncio.sleep(0.01)
        found = await play.ask()
    await asyncio.gather(*others)
    return found


@scene
async def too_many(play: Play) -> Seen:
    return await _beside_another(play, limits={"generations": 1})


@scene
async def too_many_for_key(play: Play) -> Seen:
    return await _beside_another(play, api_keys=[{"key": "any", "generations": 1}])


@scene
async def queue_full(play: Play) -> Seen:
    return await _beside_another(play, waiting=1, limits={"generations": 1, "queue": 1})


@scene
async def queue_timeout(play: Play) -> Seen:
    limits = {"generations": 1, "queue": 1, "queue_seconds": 0.1}
    return await _beside_another(play, limits=limits)
