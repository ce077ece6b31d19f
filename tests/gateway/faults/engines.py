"""Scenes of engines that fail: before the first token, in the middle, or by being slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway import pace, sse
from gateway.context import GATEWAY
from relaygen.events import Role
from tests.gateway.fakes import Error, FakeEngine, Fin, Gate, Raw, Reset, silence, writes
from tests.gateway.fakes.engines import CHAT, COMPLETIONS
from tests.gateway.faults.play import SCENES, Play, Scene, big, scene, tiny
from tests.gateway.faults.rows import Seen
from tests.gateway.support import POLICY, WAIT_S, within
from tests.gateway.test_resuming import after
from tests.gateway.tooling import CALL, TOOLS, two

NONE_LEFT = {"resume": {"seconds": 0}}
"""Who breaks is not asked again."""
SOON_S = 0.3
SAYS_NO = b'{"error": {"message": "not now"}}'

# ---- before the first token ---------------------------------------------------------------------


@scene
async def refuses_alone(play: Play) -> Seen:
    await play.serve([large := big()])
    await large.stop()
    return await play.ask()


@scene
async def refuses_with_another(play: Play) -> Seen:
    await play.serve([gone := big(), big()])
    await gone.stop()
    return await play.ask()


@scene
async def known_to_be_down(play: Play) -> Seen:
    served = await play.serve([large := big()])
    await large.stop()
    await play.ask()
    await play.begin(served)
    return await play.ask()


async def _refused_with(play: Play, status: int) -> Seen:
    await play.serve([large := big()])
    large.refusals[COMPLETIONS] = (status, SAYS_NO)
    return await play.ask()


@scene
async def refuses_our_key(play: Play) -> Seen:
    return await _refused_with(play, 401)


@scene
async def busy_alone(play: Play) -> Seen:
    return await _refused_with(play, 429)


FIRST_TOKEN = {"timeouts": {"first_token": SOON_S}}


@scene
async def silent_at_first_alone(play: Play) -> Seen:
    await play.serve([big(writes(silence()))], settings=FIRST_TOKEN)
    return await play.ask()


@scene
async def silent_at_first_with_another(play: Play) -> Seen:
    await play.serve([big(writes(silence())), big()], settings=FIRST_TOKEN)
    return await play.ask()


# ---- in the middle ------------------------------------------------------------------------------

ACTS: dict[str, Callable[[], Any]] = {
    "reset": Reset,
    "truncated": Fin,
    "error_event": Error,
    "garbage": lambda: Raw(b"data: {nonsense\n\n"),
    "oversized": lambda: Raw(b"data: %s\n\n" % (b"x" * 20_000)),
    "idle": silence,
}


def _breaks_in_a_segment(name: str, *, another: bool) -> Scene:
    async def play_it(play: Play) -> Seen:
        if name == "oversized":
            play.patch.setattr(sse, "MAX_EVENT_BYTES", 10_000)
        settings = {"timeouts": {"idle": SOON_S}} if name == "idle" else {}
        broken = big(after(2, ACTS[name]()))
        engines = [broken, big()] if another else [broken]
        await play.serve(engines, settings=settings if another else settings | NONE_LEFT)
        return await play.ask()

    return play_it


async def _at_a_handoff(play: Play, large: list[FakeEngine], settings: Any, fault: Any) -> Seen:
    """The fault comes over the first large engine while the small one writes."""
    gate = Gate()
    tell = tiny().script
    small = tiny(lambda prompt: [gate, *tell(prompt)])
    await play.serve(large, [small], settings=settings)

    async def happens() -> None:
        await within(WAIT_S, gate.reached.wait())
        await fault(large[0])
        gate.opened.set()

    happening = play.beside(happens())
    found = await play.ask()
    await happening
    return found


def _refuses_at_a_handoff(status: int, *, another: bool) -> Scene:
    async def fault(engine: FakeEngine) -> None:
        engine.refusals[COMPLETIONS] = (status, SAYS_NO)

    async def play_it(play: Play) -> Seen:
        engines: list[FakeEngine] = [big(), big()] if another else [big()]
        return await _at_a_handoff(play, engines, {} if another else NONE_LEFT, fault)

    return play_it


for _another, _ending in ((True, "with_another"), (False, "with_none_left")):
    for _name in ACTS:
        SCENES[f"{_name}_{_ending}"] = _breaks_in_a_segment(_name, another=_another)
    for _status in (500, 429):
        SCENES[f"http_{_status}_{_ending}"] = _refuses_at_a_handoff(_status, another=_another)


@scene
async def gone_at_a_handoff(play: Play) -> Seen:
    return await _at_a_handoff(play, [big(), big()], {}, lambda engine: engine.stop())


@scene
async def attempts_used_up(play: Play) -> Seen:
    await play.serve([big(writes("<think>", Reset()))], settings={"resume": {"attempts": 1}})
    return await play.ask()


@scene
async def tools_break(play: Play) -> Seen:
    served, _, _ = await two(play.stage, CALL, Reset())
    await play.begin(served)
    return await play.ask(tools=TOOLS)


# ---- too slow -----------------------------------------------------------------------------------


@scene
async def reply_too_long(play: Play) -> Seen:
    settings = {"timeouts": {"total": SOON_S}}
    await play.serve([big(writes("<think>", "Six", silence()))], settings=settings)
    return await play.ask()


@scene
async def slow_to_begin(play: Play) -> Seen:
    slow = {"small": {"first_token": SOON_S}}
    await play.serve([big()], [tiny(writes(silence())), tiny()], slow=slow)
    return await play.ask()


NO_ENGINE_IS_SO_FAST = {"large": {"tokens_per_second": 1e9}}


async def _slow_to_decode(play: Play, *others: FakeEngine) -> Seen:
    """Tokens come only when those before have reached the client."""
    play.patch.setattr(pace, "_JUDGED_S", 0.0)
    gates, tell = [Gate(), Gate()], big().script

    def script(prompt: str) -> list[Any]:
        tokens = list(tell(prompt))
        return [*tokens[:2], gates[0], *tokens[2:3], gates[1], *tokens[3:]]

    settings = {"resume": {"attempts": 1}}  # the other one would be left for this one again
    await play.serve([big(script), *others], settings=settings, slow=NO_ENGINE_IS_SO_FAST)
    return await play.ask(gates=gates)


@scene
async def slow_to_decode(play: Play) -> Seen:
    return await _slow_to_decode(play, big())


@scene
async def slow_without_another(play: Play) -> Seen:
    return await _slow_to_decode(play)


@scene
async def small_is_slower(play: Play) -> Seen:
    served = await play.serve([big()], [small := tiny()], slow={"hold": True})
    measured = served.app[GATEWAY].relaying.paces[POLICY]
    measured.add(Role.LARGE, 300, 3.0)
    measured.add(Role.SMALL, 300, 6.0)
    found = await play.ask()
    assert small.decodes == []
    return found


# ---- a role that is gone ------------------------------------------------------------------------


@scene
async def small_is_down(play: Play) -> Seen:
    await play.serve([big()], [small := tiny()])
    await small.stop()
    return await play.ask()


@scene
async def small_breaks(play: Play) -> Seen:
    acts, tell = iter([Reset()]), tiny().script
    await play.serve([big()], [tiny(lambda prompt: list(acts) or tell(prompt))])
    return await play.ask()


@scene
async def small_keeps_breaking(play: Play) -> Seen:
    settings = {"health": {"failures": 2}, "resume": {"attempts": 2}}
    await play.serve([big()], [small := tiny(writes(Reset()))], settings=settings)
    found = await play.ask()
    assert len(small.decodes) == 2
    return found


@scene
async def small_breaks_and_must_not(play: Play) -> Seen:
    fail = {"small": "fail"}
    await play.serve([big()], [tiny(writes(Reset()))], settings=NONE_LEFT, on_failure=fail)
    return await play.ask()


STANDS_IN = {"large": "small"}


@scene
async def large_is_down(play: Play) -> Seen:
    await play.serve([large := big()], on_failure=STANDS_IN)
    await large.stop()
    return await play.ask()


@scene
async def large_breaks(play: Play) -> Seen:
    await play.serve([big(after(2, Reset()))], on_failure=STANDS_IN)
    return await play.ask()


# ---- replicas -----------------------------------------------------------------------------------


@scene
async def breaker_opens(play: Play) -> Seen:
    settings = {"health": {"failures": 1}}
    await play.serve([big(after(2, Error())), big()], settings=settings)
    return await play.ask()


@scene
async def draining(play: Play) -> Seen:
    await play.reloadable([left := big(), big()])
    backends = play.config["backends"]
    play.configure(backends={**backends, "large": {**backends["large"], "draining": [left.url]}})
    await play.said("settings loaded")
    found = await play.ask()
    assert left.decodes == []
    return found


# ---- passed through -----------------------------------------------------------------------------


async def _passed_through(play: Play, *large: FakeEngine, **policy: Any) -> None:
    for engine in large:
        engine.chats = True
    await play.serve(large, **policy)


@scene
async def passthrough_refused(play: Play) -> Seen:
    await _passed_through(play, gone := big(), big())
    await gone.stop()
    return await play.ask(model="big")


@scene
async def passthrough_breaks(play: Play) -> Seen:
    await _passed_through(play, big(after(2, Reset())))
    return await play.ask(model="big")


@scene
async def passthrough_breaks_translated(play: Play) -> Seen:
    await _passed_through(play, big(after(2, Reset())), tools="whole")
    tool = {"name": "look", "input_schema": {"type": "object"}}
    return await play.ask("/v1/messages", max_tokens=99, tools=[tool])


@scene
async def passthrough_500(play: Play) -> Seen:
    await _passed_through(play, large := big())
    large.refusals[CHAT] = (500, SAYS_NO)
    return await play.ask(model="big")
