"""What counts for and against a replica, over real sockets."""

from __future__ import annotations

from tests.gateway.fakes import Error, FakeVllm
from tests.gateway.support import Stage, stream, until_ready
from tests.gateway.test_resuming import after


async def test_what_is_passed_through_counts_as_a_success_too(stage: Stage) -> None:
    """Failures that are not in a row open nothing."""
    large = FakeVllm(after(2, Error()), model="big")
    large.chats = True
    settings = {"health": {"failures": 2}, "resume": {"seconds": 0}}
    served = await stage.pair(large, FakeVllm(model="tiny"), settings)
    await until_ready(served, 200)
    broken, sound = large.script, after(99, None)
    for script, model in ((broken, "pair"), (sound, "big"), (broken, "pair")):
        large.script = script
        try:
            await stream(served, model=model)
        except Exception as error:  # noqa: BLE001 - what breaks is told elsewhere
            assert script is broken, error
    states = [r["state"] for r in (await until_ready(served, 200))["backends"]["large"]]
    assert states == ["up"]
