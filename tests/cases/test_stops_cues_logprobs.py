"""Stop strings and cues over any tokens, logprobs and stops within an engine's limits, budgets."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from relaygen.session import Limits
from tests.cases import case
from tests.cases.memory import COMPLETING, Relay
from tests.cases.support import BY_CHAT, Dialect, pair_of, served_by
from tests.gateway.fakes import (
    FakeEngine,
    FakeHosted,
    FakeLlamaCpp,
    FakeSglang,
    FakeTgi,
    FakeVllm,
    Request,
    story,
)
from tests.gateway.support import ANSWER, Stage, ask, stream

ALL = pytest.mark.parametrize("dialect", [FakeVllm, FakeLlamaCpp, FakeSglang, FakeTgi])
BOTH_WAYS = pytest.mark.parametrize("backend", [{}, BY_CHAT], ids=["completions", "chat"])


def bodies(*engines: FakeEngine) -> list[dict[str, Any]]:
    """What each decode asked for; TGI has it one level down."""
    decodes = [decode.body for engine in engines for decode in engine.decodes]
    return [body.get("parameters", body) for body in decodes]


def every_split(text: str) -> list[list[str]]:
    inner = range(1, len(text))
    cuts = [c for size in range(len(text)) for c in combinations(inner, size)]
    return [
        [text[a:b] for a, b in zip((0, *c), (*c, len(text)), strict=True)]  # all of its tokens
        for c in cuts
    ]


# ---- stop strings -------------------------------------------------------------------------------

SPANNING = (
    "ggml-org/llama.cpp#9867", "ggml-org/llama.cpp#10914", "ggml-org/llama.cpp#11538",
    "mzau/mlx-knife#68",
)  # fmt: skip


@case(24, *SPANNING)
@pytest.mark.parametrize(
    ("text", "stops", "told"),
    [
        ("a ENDb", ("END",), "a "),
        ("aENEND", ("END",), "aEN"),
        ("ab EN", ("END",), "ab EN"),
        ("xababc", ("abc", "babd"), "xab"),
        ("EENDEN", ("END", "NEVER"), "E"),
    ],
)
def test_a_stop_string_is_found_over_any_tokens_and_nothing_else_is_lost(
    text: str, stops: tuple[str, ...], told: str
) -> None:
    """Catches a search token by token, a hold-back never let go, and text sent twice after it."""
    for tokens in every_split(text):
        script = story("<think>", "Hm", "</think>", *tokens)
        got = Relay(COMPLETING[0], script, limits=Limits(stops=stops)).told()
        assert got.content == told, tokens
        assert got.finish == "stop"


@case(24, *SPANNING)
@ALL
async def test_what_was_held_back_for_a_stop_string_comes_out_at_the_end(
    stage: Stage, dialect: Dialect
) -> None:
    """Catches a tail that stays in the buffer when the stream ends."""
    served = await stage.pair(*pair_of(dialect))
    assert (await stream(served, stop=["12. And so on"])).text("content") == ANSWER
    assert (await stream(served, stop=["is 12"])).text("content") == "\n\nIt "


RESTATED = ("<think>", "Question", ":", " how", " many", "?", " Now", " count", ".", "</think>",
            "It", " is", " 1", "2", ".", "\n", "Question", ":", " next", "?")  # fmt: skip


@case(
    25, "vllm-project/vllm#52393", "vllm-project/vllm#53066", "vllm-project/vllm#38499",
    "vllm-project/vllm#14550", "vllm-project/vllm#52486", "vllm-project/vllm#45846",
)  # fmt: skip
@BOTH_WAYS
async def test_a_stop_string_that_the_thoughts_restate_does_not_end_them(
    stage: Stage, backend: dict[str, Any]
) -> None:
    """Catches stops left to the engine: some apply them to the thinking, and content is null."""
    large, small = pair_of(FakeVllm, *RESTATED)
    served = await served_by(stage, large, small, backend)
    choice = (await ask(served, stop=["Question:"]))["choices"][0]
    assert choice["message"]["reasoning_content"] == "Question: how many? Now count."
    assert choice["message"]["content"] == "It is 12.\n"
    assert choice["finish_reason"] == "stop"


# ---- cues ---------------------------------------------------------------------------------------


@case(25, "vllm-project/vllm#52393", "vllm-project/vllm#14550")
@case(26, "vllm-project/vllm#51641", "vllm-project/vllm#52599")
@ALL
async def test_no_engine_is_ever_sent_a_stop_string(stage: Stage, dialect: Dialect) -> None:
    """Catches cues or stops as the engine's `stop`: it holds text back, or ignores them."""
    large, small = pair_of(dialect)
    served = await stage.pair(large, small)
    extra = {"include_stop_str_in_output": True}
    reply = await ask(served, stop=["is 12"], extra_body=extra)
    assert reply["choices"][0]["message"]["content"] == "\n\nIt is 12"
    assert reply["usage"]["relaygen"]["handoffs"] == 5
    sent = {key for body in bodies(large, small) for key in body if "stop" in key}
    assert sent == set()


THEREFORE = ("<think>", "Hm", ".", " There", "fore", " it", " is", ".", "</think>", "Fine")
THEREBY = ("<think>", "Hm", ".", " There", "by", " it", " is", ".", "</think>", "Fine")


@case(26, "vllm-project/vllm#51641", "vllm-project/vllm#52599")
@BOTH_WAYS
@pytest.mark.parametrize(
    ("tokens", "begun"), [(THEREFORE, "<think>Hm. Therefore"), (THEREBY, "<think>Hm.</think>")]
)
async def test_a_cue_over_two_tokens_fires_and_its_beginning_alone_does_not(
    stage: Stage, backend: dict[str, Any], tokens: tuple[str, ...], begun: str
) -> None:
    """Catches cues compared with single tokens, and cues that match as they begin."""
    large, small = pair_of(FakeVllm, *tokens)
    served = await served_by(stage, large, small, backend, cues={"words": ["Therefore"]})
    reply = await ask(served)
    assert reply["choices"][0]["message"]["reasoning_content"] == "".join(tokens[1:8])
    first = small.prompts()[0].rpartition("assistant\n")[2]
    assert first == (begun if tokens is THEREFORE else "".join(tokens[:9]))


@case(26, "vllm-project/vllm#51641")
async def test_a_word_that_a_cue_begins_is_no_cue(stage: Stage) -> None:
    """Catches a cue that is found inside "Thereby", before the word's end has come."""
    large, small = pair_of(FakeVllm, *THEREBY)
    await ask(await stage.pair(large, small, cues={"words": ["Therefore", "The", "here"]}))
    assert len(small.decodes) == 1  # the answer


# ---- logprobs -----------------------------------------------------------------------------------


class Limited(FakeVllm):
    """Started with a lower `--max-logprobs`."""

    most = 5

    def reply(self, request: Request) -> Any:
        asked = max(request.body.get(key) or 0 for key in ("top_logprobs", "logprobs"))
        if asked > self.most:
            raise self.refusal(
                f"Requested sample logprobs of {asked}, which is greater than max allowed: "
                f"{self.most}"
            )
        return super().reply(request)


@case(29, "vllm-project/vllm#5299", "vllm-project/vllm#16546")
@BOTH_WAYS
async def test_more_logprobs_than_an_engine_tells_are_lowered_and_remembered(
    stage: Stage, backend: dict[str, Any]
) -> None:
    """Catches the client's number sent on: a 400 where fewer alternatives would do."""
    large, small = pair_of(Limited)
    served = await served_by(stage, large, small, backend)
    for _ in range(2):
        reply = await ask(served, logprobs=True, top_logprobs=20)
        entries = reply["choices"][0]["logprobs"]["content"]
        assert {len(entry["top_logprobs"]) for entry in entries} == {5}
    key = "top_logprobs" if backend else "logprobs"
    for engine in (large, small):
        assert [body[key] for body in bodies(engine)] == [20, *[5] * 6]


@case(29, "vllm-project/vllm#5299", "vllm-project/vllm#16546")
@ALL
async def test_relaying_itself_needs_no_alternatives(stage: Stage, dialect: Dialect) -> None:
    """Catches alternatives asked for with every token."""
    large, small = pair_of(dialect)
    await ask(await stage.pair(large, small))
    keys = ("logprobs", "top_logprobs", "top_n_tokens")
    asked = [body.get(key) or 0 for body in bodies(large, small) for key in keys]
    assert max(asked) == (1 if dialect is FakeLlamaCpp else 0)


# ---- an engine's limits -------------------------------------------------------------------------

SIX = ["Never", "ever", "nor", "then", "there", "is 12"]


@case(30, "huggingface/text-generation-inference#2584")
@ALL
async def test_six_stop_strings_and_as_many_cues_work_on_every_engine(
    stage: Stage, dialect: Dialect
) -> None:
    """Catches stops sent to a server that takes four: a 422."""
    large, small = pair_of(dialect)
    served = await stage.pair(large, small, cues={"words": ["Now", "Thus", *"ABCDEF"]})
    reply = await stream(served, stop=SIX)
    assert reply.text("content") == "\n\nIt "
    assert reply.finishes == ["stop"]


# ---- budgets ------------------------------------------------------------------------------------

IGNORED = (
    "ggml-org/llama.cpp#13700", "ggml-org/llama.cpp#19831", "mozilla-ai/llamafile#701",
    "huggingface/text-generation-inference#2844",
)  # fmt: skip


@case(31, *IGNORED)
@ALL
async def test_a_budget_is_told_to_every_segment_as_what_is_left(
    stage: Stage, dialect: Dialect
) -> None:
    """Catches `max_completion_tokens` sent on as it is, and the whole budget for each segment."""
    large, small = pair_of(dialect)
    served = await stage.pair(large, small)
    reply = await ask(served, max_completion_tokens=10)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 10
    assert reply["usage"]["relaygen"]["segments"] == 2
    key = "max_new_tokens" if dialect is FakeTgi else "max_tokens"
    assert [body[key] for body in [*bodies(large), *bodies(small)]] == [10, 4]
    assert all("max_completion_tokens" not in body for body in bodies(large, small))


@case(31, *IGNORED)
@BOTH_WAYS
async def test_ten_tokens_over_three_segments_are_ten(
    stage: Stage, backend: dict[str, Any]
) -> None:
    """Catches a last segment that ends in `stop`, and one that begins with nothing left."""
    tokens = ("<think>", "So", ".", " Now", " it", ".", " Hm", " Hm", " Hm", " Hm", " Hm", " Hm")
    large, small = pair_of(FakeVllm, *tokens)
    served = await served_by(stage, large, small, backend)
    reply = await stream(served, max_completion_tokens=10, stream_options={"include_usage": True})
    assert reply.text("reasoning_content") == "".join(tokens[1:10])
    assert reply.finishes == ["length"]
    assert reply.usages[0]["completion_tokens"] == 10
    assert [body["max_tokens"] for body in bodies(large, small)] == [10, 4, 6]


@case(31, *IGNORED)
async def test_a_hosted_api_is_told_max_tokens(stage: Stage) -> None:
    """Catches the newer name sent to servers that know only the older one."""
    large, small = pair_of(FakeHosted)
    small.reasoning = large.reasoning = "inline"  # type: ignore[attr-defined]
    backend = {"engine": "openai", "continuation": "chat"}
    served = await served_by(stage, large, small, backend)
    await ask(served, max_completion_tokens=10)
    for body in bodies(large, small):
        assert 0 < body["max_tokens"] <= 10
        assert "max_completion_tokens" not in body
