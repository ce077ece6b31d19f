"""Going on by chat with own engines: exactly what the client got, or refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gateway.connections import Connections
from gateway.engines.chat import Chat
from gateway.engines.vllm import VllmEngine
from gateway.settings import Timeouts
from gateway.upstream import Upstream
from relaygen.policy import Thinking
from tests.gateway.fakes import (
    FakeEngine,
    FakeLlamaCpp,
    FakeSglang,
    FakeVllm,
    Request,
    Tokenizer,
    story,
    writes,
)
from tests.gateway.fakes.chat import ChatReply, Parts
from tests.gateway.fakes.engines import CHAT
from tests.gateway.fakes.script import ASSISTANT
from tests.gateway.support import (
    ANSWER,
    POLICY,
    REASONING,
    STORY,
    USER,
    Served,
    Stage,
    ask,
    backends_of,
    get,
    policy_of,
    stream,
)

LINES = ("<think>", "\n", *STORY[1:13], "\n", *STORY[13:])
"""The same with a line end beside each tag, as most models write it."""
OPENED = "<think>\n"
BY_CHAT = {"continuation": "chat"}


class ParsingVllm(FakeVllm):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reasoning_parser = True


class TaggedLlamaCpp(FakeLlamaCpp):
    """Has found the tags in its template."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.think_tags = ("<think>", "</think>")


class LinedLlamaCpp(FakeLlamaCpp):
    """Its template writes the line ends beside the tags."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.think_tags = ("<think>\n", "\n</think>\n\n")


class ForcedSglang(FakeSglang):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.force_reasoning = True


class NewSglang(FakeSglang):
    """Encodes the chat and the prefix in one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.encodes_prefix_apart = False


Dialect = Callable[..., FakeEngine]
ALL = (FakeVllm, ParsingVllm, FakeLlamaCpp, TaggedLlamaCpp, LinedLlamaCpp, FakeSglang, ForcedSglang,
       NewSglang)  # fmt: skip
EXACT = (FakeVllm, ParsingVllm, TaggedLlamaCpp, FakeSglang, ForcedSglang, NewSglang)


async def serve(stage: Stage, *engines: FakeEngine, **policy: Any) -> Served:
    for engine in engines:
        engine.chats = True
        await stage.engine(engine)
    large, small = engines
    backends = {name: {**b, **BY_CHAT} for name, b in backends_of(large, small).items()}
    return await stage.gateway({"backends": backends}, policy_of(large, small, **policy))


def pair(
    dialect: Dialect, tokens: tuple[str, ...] = STORY, small: Dialect | None = None, **options: Any
) -> tuple[Any, Any]:
    script, vocabulary = story(*tokens), Tokenizer()
    return (
        dialect(script, model="big", tokenizer=vocabulary, **options),
        (small or dialect)(script, model="tiny", tokenizer=vocabulary, **options),
    )


async def told(served: Served, **request: Any) -> tuple[str, str]:
    message = (await ask(served, **request))["choices"][0]["message"]
    return message.get("reasoning_content", ""), message["content"]


def begun(*engines: FakeEngine) -> list[str]:
    """What of the reply each decode was to go on from."""
    prompts = [prompt for engine in engines for prompt in engine.prompts()]
    return [prompt.rpartition(ASSISTANT)[2] for prompt in prompts]


# ---- exact, or refused --------------------------------------------------------------------------

REFUSED: dict[tuple[str, str], tuple[Dialect, ...]] = {
    ("verbatim", ""): (),
    ("verbatim", OPENED): (FakeLlamaCpp,),
    ("qwen3", ""): (FakeVllm, ParsingVllm),
    ("qwen3", OPENED): (FakeVllm, ParsingVllm),
    ("r1", ""): (FakeVllm, ParsingVllm),
    ("r1", OPENED): (FakeVllm, ParsingVllm, FakeLlamaCpp),
}
"""By template, and what it opens itself: whose chat endpoint does not go on exactly."""


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize(("template", "opens"), REFUSED)
async def test_it_is_exact_or_refused_with_a_reason(
    stage: Stage, template: Any, opens: str, dialect: Dialect
) -> None:
    tokens = (OPENED, *LINES[2:]) if opens else LINES
    large, small = pair(dialect, tokens, opens=opens)
    large.template = small.template = template
    served = await serve(stage, large, small, thinking={"field": "inline"})
    status, body = await get(served, "/readyz")
    policy = body["policies"][POLICY]
    if dialect in REFUSED[template, opens]:
        assert (status, policy["ready"]) == (503, False)
        assert "its template rewrites the message" in policy["error"]
        assert "use continuation: completions" in policy["error"]
        return
    assert (status, policy["handoff"]) == (200, "text")
    _, text = await told(served)
    whole = opens + text
    # What a template writes after the closing tag the model does not write again.
    assert whole.replace("</think>\n\n", "</think>") == "".join(tokens).replace("\n\n", "")
    assert all(whole.startswith(prefix.removesuffix("\n\n")) for prefix in begun(large, small))
    assert len(small.decodes) == 3


@pytest.mark.parametrize("status", [408, 429, 503])
async def test_an_engine_too_busy_to_be_asked_is_asked_again(stage: Stage, status: int) -> None:
    large, small = pair(FakeLlamaCpp, LINES)
    large.refusals["/apply-template"] = (status, b'{"error": {"message": "not now"}}')
    served = await serve(stage, large, small)
    state = (await get(served, "/readyz"))[1]["policies"][POLICY]
    assert "not now" in state["error"]
    large.refusals.clear()
    assert (await get(served, "/readyz"))[0] == 200


@pytest.mark.parametrize("dialect", EXACT)
@pytest.mark.parametrize("opens", ["", OPENED])
@pytest.mark.parametrize("per_chunk", [1, 3, 50])
async def test_no_character_is_lost_or_doubled(
    stage: Stage, dialect: Dialect, opens: str, per_chunk: int
) -> None:
    tokens = (opens, *STORY[1:]) if opens else STORY
    large, small = pair(dialect, tokens, opens=opens)
    large.tokens_per_chunk = small.tokens_per_chunk = per_chunk
    served = await serve(stage, large, small)
    assert await told(served) == (REASONING, ANSWER)
    assert {r.path for r in large.decodes + small.decodes} == {CHAT}
    assert all("".join(tokens).startswith(prefix) for prefix in begun(large, small))
    if per_chunk == 1:
        assert begun(small)[-1].endswith("twelve.</think>")


@pytest.mark.parametrize("small", [FakeVllm, TaggedLlamaCpp, FakeSglang])
@pytest.mark.parametrize("large", [ParsingVllm, TaggedLlamaCpp, FakeSglang])
async def test_unlike_engines_go_on_from_one_another(
    stage: Stage, large: Dialect, small: Dialect
) -> None:
    served = await serve(stage, *pair(large, small=small))
    assert await told(served) == (REASONING, ANSWER)


@pytest.mark.parametrize("dialect", EXACT)
async def test_a_blank_is_left_for_the_next_engine(stage: Stage, dialect: Dialect) -> None:
    tokens = (
        "<think>",
        "Six",
        ".",
        " Now",
        " ",
        "it",
        " ",
        "is",
        ".",
        "\n",
        "</think>",
        "\n",
        "It",
    )
    large, small = pair(dialect, tokens)
    served = await serve(stage, large, small)
    assert await told(served) == ("Six. Now it is.\n", "\nIt")
    assert not any(prefix.endswith((" ", "\n")) for prefix in begun(large, small))


@pytest.mark.parametrize("dialect", [d for d in EXACT if d is not ParsingVllm])
async def test_a_model_that_does_not_think_just_answers(stage: Stage, dialect: Dialect) -> None:
    large, small = pair(dialect)
    large.script = writes("It", " is", " 1", "2", ".")
    served = await serve(stage, large, small)
    assert await told(served) == ("", "It is 12.")


# ---- what the engine is sent --------------------------------------------------------------------


@pytest.mark.parametrize("dialect", [FakeVllm, ParsingVllm, FakeSglang, NewSglang])
async def test_the_clients_own_beginning_is_gone_on_with(stage: Stage, dialect: Dialect) -> None:
    large, small = pair(dialect)
    served = await serve(stage, large, small)
    messages = [*USER, {"role": "assistant", "content": "<think>Six plus"}]
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    assert await told(served, messages=messages, extra_body=flags) == (REASONING[8:], ANSWER)
    assert begun(small)[0] == "<think>Six plus six. Now"


async def test_an_earlier_answer_is_a_turn_of_its_own(stage: Stage) -> None:
    large, small = pair(FakeVllm)
    served = await serve(stage, large, small)
    messages = [*USER, {"role": "assistant", "content": "Eleven."}]
    assert await told(served, messages=messages) == (REASONING, ANSWER)
    turns = "<|im_start|>assistant\nEleven.<|im_end|>\n<|im_start|>assistant\n<think>Six"
    assert all(turns in prompt for prompt in small.prompts())


@pytest.mark.parametrize("dialect", EXACT)
async def test_limits_travel_with_the_chat(stage: Stage, dialect: Dialect) -> None:
    large, small = pair(dialect)
    served = await serve(stage, large, small)
    reply = await ask(served, seed=-1, max_tokens=18, extra_body={"min_tokens": 9, "top_k": 3})
    assert reply["choices"][0]["finish_reason"] == "length"
    first = large.decodes[0].body
    assert (first["max_tokens"], first["top_k"]) == (18, 3)
    llamacpp = issubclass(dialect, FakeLlamaCpp)  # type: ignore[arg-type]
    assert first.get("min_tokens") == (None if llamacpp else 9)
    assert first["seed"] == (2**32 - 2 if llamacpp else -1)


async def test_template_options_travel_with_the_chat(stage: Stage) -> None:
    large, small = pair(FakeVllm)
    large.script = writes("Fine")
    served = await serve(stage, large, small)
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    assert await told(served, extra_body=options) == ("", "Fine")
    assert large.prompts()[0].endswith("</think>\n\n")


@pytest.mark.parametrize("dialect", [FakeVllm, ParsingVllm, FakeSglang])
async def test_tokens_are_counted_as_the_engine_tells_them(stage: Stage, dialect: Dialect) -> None:
    served = await serve(stage, *pair(dialect))
    reply = await stream(served, stream_options={"include_usage": True})
    [usage] = reply.usages
    assert usage["completion_tokens"] == len(STORY) + 1
    assert "estimated" not in usage["relaygen"]


@pytest.mark.parametrize("dialect", EXACT)
async def test_logprobs_are_told_by_chat_too(stage: Stage, dialect: Dialect) -> None:
    served = await serve(stage, *pair(dialect))
    reply = await ask(served, logprobs=True, top_logprobs=2)
    entries = reply["choices"][0]["logprobs"]["content"]
    assert {entry["logprob"] for entry in entries} == {-0.25}
    assert "Six" in [entry["token"] for entry in entries]


# ---- parsers that misjudge ----------------------------------------------------------------------


class Misfiling(FakeVllm):
    """Its parser puts all text, tags and all, into one field, wherever the model stands."""

    field = "content"

    def reply(self, request: Request) -> Any:
        reply = super().reply(request)
        if isinstance(reply, ChatReply):
            reply.parts = OneField(False, self.field)
        return reply


class OneField(Parts):
    def _one(self, token: Any) -> str:
        return self._field


@pytest.mark.parametrize("field", ["content", "reasoning"])
async def test_text_in_the_wrong_field_is_what_it_is(stage: Stage, field: str) -> None:
    large, small = pair(FakeVllm, small=Misfiling)
    small.field = field
    served = await serve(stage, large, small)
    assert await told(served) == (REASONING, ANSWER)


@pytest.mark.parametrize(
    ("dialect", "closes"),
    [
        (FakeVllm, ("</think>",)),
        (FakeVllm, ("</", "think", ">")),
        (ParsingVllm, ("</think>",)),
        (FakeSglang, ("</think>",)),
        (TaggedLlamaCpp, ("</think>",)),
    ],
)
async def test_a_thought_that_closes_with_the_first_token_is_closed(
    stage: Stage, dialect: Dialect, closes: tuple[str, ...]
) -> None:
    """A parser swallows the tag, and no reasoning came before the content."""
    tokens = ("<think>", "Six", ".", " Now", " it", ".", *closes, "Fine", ".")
    large, small = pair(dialect, tokens)
    served = await serve(stage, large, small)
    assert await told(served) == ("Six. Now it.", "Fine.")
    assert begun(large)[-1].endswith("Now it.")
    assert begun(small)[-1].endswith("Now it.</think>")


async def test_a_tokenizer_that_is_not_open_is_no_hindrance() -> None:
    engine = FakeVllm()
    engine.refusals["/tokenize"] = (404, b'{"detail": "Not Found"}')
    await engine.start()
    async with Connections(Timeouts()) as session:
        vllm = VllmEngine(Upstream(session, engine.url.removesuffix("/v1")), "chat")
        parser = await vllm._parser("model", Chat({"messages": USER}, Thinking()))
    await engine.stop()
    assert parser.close == ()
