"""Where the time of a generation went."""

from __future__ import annotations

import asyncio

import pytest

from gateway.context import GATEWAY
from gateway.spent import Spent, spent_object
from relaygen.events import Role
from relaygen.usage import Usage
from tests.gateway.fakes import FakeVllm, Gate, Tokenizer, story, writes
from tests.gateway.support import WAIT_S, Stage, ask, within

L, S = Role.LARGE, Role.SMALL
USAGE = Usage(large_tokens=11, small_tokens=21)


def spent() -> Spent:
    """Two decodes of the large model at 20 ms a token, one of the small one at 5."""
    spent = Spent(prepare=0.004, total=0.5)
    spent.add(L, 0.03, 6, 0.12)
    spent.add(L, 0.05, 6, 0.12)
    spent.add(S, 0.02, 20, 0.1)
    return spent


def test_ideal_is_first_tokens_and_each_kept_token_at_its_own_speed() -> None:
    # 11 and 21 tokens, of which 2 and 1 are first ones.
    assert spent().ideal(USAGE) == pytest.approx(0.1 + 9 * 0.02 + 20 * 0.005)
    assert spent().efficiency(USAGE) == pytest.approx(0.38 / 0.5)


def test_a_role_that_wrote_nothing_takes_no_time() -> None:
    alone = Spent(total=0.4)
    alone.add(L, 0.1, 3, 0.3)
    assert alone.ideal(Usage(large_tokens=4)) == pytest.approx(0.4)
    assert alone.efficiency(Usage(large_tokens=9)) == 1.0


def test_nothing_timed_has_no_efficiency() -> None:
    assert Spent().efficiency(Usage()) is None
    assert spent_object([])["efficiency"] is None


def test_choices_are_summed() -> None:
    told = spent_object([(spent(), USAGE), (spent(), USAGE)])
    assert told["prepare_ms"] == 4
    assert told["prefill_ms"] == {"large": 160, "small": 40}
    assert told["decode_ms"] == {"large": 480, "small": 200}
    assert (told["total_ms"], told["other_ms"], told["ideal_ms"]) == (1000, 120, 760)
    assert told["efficiency"] == pytest.approx(0.76)


async def test_it_is_told_where_traces_are_asked_for(stage: Stage) -> None:
    texts = ("<think>", "Six", " Now", " it", " is", ".", "</think>", "Fine")
    vocabulary = Tokenizer()
    large, small = (FakeVllm(story(*texts), model=m, tokenizer=vocabulary) for m in ("b", "t"))
    served = await stage.pair(large, small)
    plain = await ask(served)
    assert "spent" not in plain["usage"]["relaygen"]
    traced = await ask(served, extra_body={"relaygen": {"trace": True}})
    told = traced["usage"]["relaygen"]["spent"]
    assert told["prefill_ms"]["large"] > 0 < told["prefill_ms"]["small"]
    parts = sum(told["prefill_ms"].values()) + sum(told["decode_ms"].values()) + told["other_ms"]
    assert parts == pytest.approx(told["total_ms"], abs=0.01)
    assert 0 < told["efficiency"] <= 1
    assert told["queue_ms"] == 0


async def test_the_time_in_the_line_is_told(stage: Stage) -> None:
    gate = Gate()
    large, small = FakeVllm(writes("Fine", gate), model="b"), FakeVllm(model="t")
    served = await stage.pair(large, small, {"limits": {"generations": 1, "queue": 1}})
    first = asyncio.create_task(ask(served))
    await within(WAIT_S, gate.reached.wait())
    second = asyncio.create_task(ask(served, extra_body={"relaygen": {"trace": True}}))
    async with asyncio.timeout(WAIT_S):
        while not served.app[GATEWAY].admission.waiting:
            await asyncio.sleep(0.001)
    gate.opened.set()
    await within(WAIT_S, first)
    told = (await within(WAIT_S, second))["usage"]["relaygen"]["spent"]
    assert told["queue_ms"] > 0
