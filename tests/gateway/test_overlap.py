"""`overlap: true`: the large model has begun by the time that it is sure to go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from gateway.context import GATEWAY
from tests.gateway.fakes import (
    FakeEngine,
    FakeLlamaCpp,
    FakeVllm,
    Gate,
    Reset,
    Script,
    silence,
    story,
)
from tests.gateway.fakes.script import Act
from tests.gateway.support import GONE_S, WAIT_S, Served, Stage, ask, leaving, scripted_pair, within

ENDS = ("<think>", "Now", " 3", ".", " So", " six", "</think>", "Six", "!")
"""What follows the dot shows that the sentence had ended."""
GOES_ON = ("<think>", "Now", " 3", ".", "14", "!", " So", " six", "</think>", "Six", "!")
DIALECTS = pytest.mark.parametrize("dialect", [FakeVllm, FakeLlamaCpp])
TEXTS = pytest.mark.parametrize("text", [ENDS, GOES_ON], ids=["ends", "goes on"])


def pausing(text: tuple[str, ...], gate: Gate) -> Script:
    """Writes the text; its first decode waits after the dot."""
    gates, goes_on = [gate], story(*text)

    def write(prompt: str) -> Iterable[Act]:
        for token in goes_on(prompt):
            yield token
            if gates and token == b".":
                yield gates.pop()

    return write


def beginning(text: tuple[str, ...], act: Act) -> Script:
    """Writes the text; the first decode that goes on after the dot begins with this."""
    acts, goes_on = [act], story(*text)

    def write(prompt: str) -> Iterable[Act]:
        if acts and prompt.endswith("."):
            yield acts.pop()
        yield from goes_on(prompt)

    return write


async def told(served: Served, large: FakeEngine, gate: Gate) -> dict[str, Any]:
    """The whole reply; the small model pauses until the large one was asked."""
    asking = asyncio.create_task(ask(served))
    await within(WAIT_S, gate.reached.wait())
    await large.decode(1)
    gate.opened.set()
    reply: dict[str, Any] = await within(WAIT_S, asking)
    return reply


@DIALECTS
@TEXTS
async def test_the_reply_is_the_same(
    stage: Stage, dialect: type[FakeEngine], text: tuple[str, ...]
) -> None:
    gate, same = Gate(), story(*text)
    served, large, _ = await scripted_pair(stage, same, pausing(text, gate), dialect, overlap=True)
    overlapped = await told(served, large, gate)
    served, _, _ = await scripted_pair(stage, same, same, dialect, overlap=False)
    plain = await ask(served)
    assert overlapped["choices"] == plain["choices"]
    ours, theirs = overlapped["usage"]["relaygen"], plain["usage"]["relaygen"]
    for key in ("large_tokens", "small_tokens", "handoffs", "resumes"):
        assert ours[key] == theirs[key]
    used = text is ENDS
    assert (ours["extra"]["overlaps"], ours["extra"]["overlaps_dropped"]) == (used, not used)
    assert "extra" not in theirs
    assert len(large.decodes) == 2 + (not used)


async def test_it_is_sent_what_the_small_model_wrote(stage: Stage) -> None:
    gate = Gate()
    served, large, _ = await scripted_pair(stage, story(*ENDS), pausing(ENDS, gate), overlap=True)
    await told(served, large, gate)
    assert large.prompts()[1].endswith("<think>Now 3.")


@DIALECTS
async def test_what_does_not_come_is_aborted(stage: Stage, dialect: type[FakeEngine]) -> None:
    gate = Gate()
    texts = (beginning(GOES_ON, silence()), pausing(GOES_ON, gate))
    served, large, _ = await scripted_pair(stage, *texts, dialect, overlap=True)
    await told(served, large, gate)
    await within(GONE_S, large.decodes[1].left.wait())


async def test_leaving_reaches_both_engines(stage: Stage) -> None:
    gate = Gate()
    texts = (beginning(ENDS, silence()), pausing(ENDS, gate))
    served, large, small = await scripted_pair(stage, *texts, overlap=True)
    async with leaving(served.url, stream=True):
        await within(WAIT_S, gate.reached.wait())
        begun = await large.decode(1)
    for decode in (begun, small.decodes[0]):
        await within(GONE_S, decode.left.wait())
    await within(WAIT_S, served.app[GATEWAY].admission.drain(WAIT_S))


@TEXTS
async def test_one_that_breaks_is_resumed_where_it_is_wanted(
    stage: Stage, text: tuple[str, ...]
) -> None:
    gate = Gate()
    served, large, _ = await scripted_pair(
        stage, beginning(text, Reset()), pausing(text, gate), overlap=True
    )
    reply = await told(served, large, gate)
    assert reply["choices"][0]["message"]["content"] == "Six!"
    assert reply["usage"]["relaygen"]["resumes"] == (text is ENDS)
