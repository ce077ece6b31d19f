"""What holds for the whole generation, whoever writes: token budgets, seeds and stop strings."""

from __future__ import annotations

import pytest

from tests.gateway.fakes import FakeEngine, FakeLlamaCpp, FakeVllm, Tokenizer, story
from tests.gateway.support import POLICY, STORY, Stage, ask, stream


def engines(*tokens: str, large_context: int = 4096, small_context: int = 4096) -> list[FakeVllm]:
    vocabulary = Tokenizer()
    return [
        FakeVllm(story(*(tokens or STORY)), model=model, tokenizer=vocabulary, context=context)
        for model, context in (("big", large_context), ("tiny", small_context))
    ]


def in_order(large: FakeEngine, small: FakeEngine, field: str) -> list[object]:
    """A field of all decodes, in the order of their prefixes."""
    decodes = [*large.decodes, *small.decodes]
    decodes.sort(key=lambda decode: len(decode.body["prompt"]))
    return [decode.body.get(field) for decode in decodes]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_the_budget_is_spent_over_all_segments(stage: Stage, field: str) -> None:
    large, small = engines()
    served = await stage.pair(large, small)
    reply = await ask(served, **{field: 13})
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 13
    assert reply["choices"][0]["message"]["reasoning_content"].endswith("Thus twelve.")
    assert in_order(large, small, "max_tokens") == [13, 7, 3, 2]


async def test_max_completion_tokens_wins_over_max_tokens(stage: Stage) -> None:
    large, small = engines()
    served = await stage.pair(large, small)
    reply = await ask(served, max_tokens=20, max_completion_tokens=4)
    assert reply["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("budget", range(1, len(STORY) + 2))
async def test_every_budget_is_kept_to_the_token(stage: Stage, budget: int) -> None:
    served = await stage.pair(*engines())
    reply = await ask(served, max_tokens=budget)
    assert reply["usage"]["completion_tokens"] == budget
    assert reply["choices"][0]["finish_reason"] == ("stop" if budget > len(STORY) else "length")


@pytest.mark.parametrize(("large_room", "small_room"), [(300, 200), (200, 300)])
async def test_without_a_budget_a_chat_may_fill_the_smaller_window(
    stage: Stage, large_room: int, small_room: int
) -> None:
    large, small = engines(large_context=large_room, small_context=small_room)
    served = await stage.pair(large, small)
    await ask(served)
    first = large.decodes[0].body
    assert first["max_tokens"] == 200 - len(first["prompt"])


async def test_a_budget_beyond_the_smaller_window_is_cut_to_it(stage: Stage) -> None:
    large, small = engines(small_context=200)
    served = await stage.pair(large, small)
    await ask(served, max_tokens=1000)
    first = large.decodes[0].body
    assert first["max_tokens"] == 200 - len(first["prompt"])


async def test_the_window_is_known_for_llamacpp_as_well(stage: Stage) -> None:
    vocabulary = Tokenizer()
    large, small = (
        FakeLlamaCpp(story(*STORY), model=model, tokenizer=vocabulary, context=context)
        for model, context in (("big", 300), ("tiny", 200))
    )
    served = await stage.pair(large, small)
    await ask(served)
    first = large.decodes[0].body
    assert first["max_tokens"] == 200 - len(first["prompt"])


async def test_a_raw_completion_without_a_budget_means_16_tokens(stage: Stage) -> None:
    served = await stage.pair(*engines())
    reply = await served.client.completions.create(model=POLICY, prompt="assistant\n")
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16
    assert reply.choices[0].finish_reason == "length"


async def test_least_tokens_count_over_all_segments(stage: Stage) -> None:
    large, small = engines()
    served = await stage.pair(large, small)
    await ask(served, extra_body={"min_tokens": 12})
    assert in_order(large, small, "min_tokens") == [12, 6, 2, 1, None, None]


async def test_each_segment_has_a_seed_of_its_own(stage: Stage) -> None:
    large, small = engines()
    served = await stage.pair(large, small)
    await ask(served, seed=100)
    assert in_order(large, small, "seed") == [100, 101, 102, 103, 104, 105]


async def test_no_seed_unless_asked(stage: Stage) -> None:
    large, small = engines()
    served = await stage.pair(large, small)
    await ask(served)
    assert set(in_order(large, small, "seed")) == {None}


# ---- stop strings -------------------------------------------------------------------------------


async def test_a_stop_string_over_several_tokens_ends_the_answer(stage: Stage) -> None:
    served = await stage.pair(*engines())
    reply = await stream(served, stop=["is 12"])
    assert reply.text("content") == "\n\nIt "
    assert reply.finishes == ["stop"]


async def test_a_stop_string_may_be_one_text(stage: Stage) -> None:
    served = await stage.pair(*engines())
    assert (await ask(served, stop=" is"))["choices"][0]["message"]["content"] == "\n\nIt"


async def test_a_stop_string_does_not_end_the_thinking(stage: Stage) -> None:
    served = await stage.pair(*engines())
    message = (await ask(served, stop=["twelve", "Six"]))["choices"][0]["message"]
    assert message["reasoning_content"] == "Six plus six. Now it is twelve. Thus twelve."
    assert message["content"] == "\n\nIt is 12."


async def test_a_policy_may_let_stop_strings_end_the_thinking(stage: Stage) -> None:
    served = await stage.pair(*engines(), stops="all")
    message = (await ask(served, stop=["is twelve"]))["choices"][0]["message"]
    assert message["reasoning_content"] == "Six plus six. Now it "


async def test_a_stop_string_is_found_across_a_handoff(stage: Stage) -> None:
    tokens = ("I", " know", " Now", " that", ".", " So", " it", " is", ".")
    served = await stage.pair(*engines(*tokens), plain="relay")
    reply = await ask(served, stop=["Now that"])
    assert reply["choices"][0]["message"]["content"] == "I know "
    assert reply["usage"]["relaygen"]["handoffs"] == 1


async def test_text_held_back_for_a_stop_string_comes_out_in_the_end(stage: Stage) -> None:
    served = await stage.pair(*engines())
    reply = await stream(served, stop=["12. And more"])
    assert reply.text("content") == "\n\nIt is 12."


async def test_the_stop_string_is_shown_when_asked(stage: Stage) -> None:
    served = await stage.pair(*engines())
    reply = await ask(served, stop=["is 1"], extra_body={"include_stop_str_in_output": True})
    assert reply["choices"][0]["message"]["content"] == "\n\nIt is 1"


async def test_stop_strings_are_not_left_to_the_engines(stage: Stage) -> None:
    large, small = engines()
    served = await stage.pair(large, small)
    await ask(served, stop=["a", "b", "c", "d", "e", "f"])
    assert set(in_order(large, small, "stop")) == {None}
