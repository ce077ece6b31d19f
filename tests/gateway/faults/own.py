"""Scenes of the gateway's own: files that are broken, its end, its bugs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from gateway import relayed
from gateway.context import GATEWAY
from tests.gateway.faults.play import Play, big, scene
from tests.gateway.faults.rows import Seen


@scene
async def bad_policy(play: Play) -> Seen:
    await play.reloadable([big()])
    play.stage.write("policy.yaml", "version: 2")
    await play.said("policy refused")
    return await play.ask()


@scene
async def bad_settings(play: Play) -> Seen:
    await play.reloadable([big()])
    play.stage.write("gateway.yaml", "prot: 1")
    await play.said("settings refused")
    return await play.ask()


@scene
async def shutting_down(play: Play) -> Seen:
    served = await play.serve([big()])
    await served.app[GATEWAY].admission.drain(0)
    return await play.ask()


async def _bug(play: Play, *, after: int) -> Seen:
    """Something of ours breaks after so many chunks."""
    good = relayed.chunks_of

    async def bad(*arguments: Any) -> AsyncGenerator[Any]:
        left = after
        async for chunks in good(*arguments):
            if not left:
                raise ZeroDivisionError("a bug")
            left -= 1
            yield chunks

    play.patch.setattr(relayed, "chunks_of", bad)
    await play.serve([big()])
    return await play.ask()


@scene
async def internal_error(play: Play) -> Seen:
    return await _bug(play, after=0)


@scene
async def internal_error_in_stream(play: Play) -> Seen:
    return await _bug(play, after=2)
