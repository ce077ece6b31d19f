"""Where the thinking is told from the answer, and what an engine goes on from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gateway.engines.chat import Chat, ChatReader
from tests.cases import case
from tests.cases.memory import ASKED, POLICY, events
from tests.cases.support import BY_CHAT, Dialect, pair_of, post, served_by, written
from tests.cases.test_sse_parsing import TAIL, text_of, wire
from tests.gateway.fakes import (
    FakeEngine,
    FakeHosted,
    FakeLlamaCpp,
    FakeSglang,
    FakeTgi,
    FakeVllm,
    Request,
)
from tests.gateway.fakes.chat import ChatReply, Parts
from tests.gateway.fakes.engines import CHAT, COMPLETIONS
from tests.gateway.support import ANSWER, REASONING, STORY, USER, Stage, ask, get, stream

SELF_HOSTED = pytest.mark.parametrize("dialect", [FakeVllm, FakeLlamaCpp, FakeSglang])
HOSTED = {"engine": "openai", "continuation": "chat"}


def prefixes(*engines: FakeEngine) -> list[str]:
    """What of the reply each decode was to go on from."""
    return [written(prompt) for engine in engines for prompt in engine.prompts()]


async def told(stage: Stage, served: Any, **request: Any) -> tuple[str, str]:
    message = (await ask(served, **request))["choices"][0]["message"]
    return message.get("reasoning_content", ""), message["content"]


# ---- the fields of the thinking -----------------------------------------------------------------

NEW, OLD = {"reasoning": "Hm."}, {"reasoning_content": "Hm."}
DELTAS = {
    "only reasoning": [NEW, NEW],
    "only reasoning_content": [OLD, OLD],
    "both at once": [{**NEW, **OLD}, {**OLD, **NEW}],
    "null beside": [{**NEW, "reasoning_content": None, "content": None}, {"reasoning": None}, OLD],
    "empty beside": [{**NEW, "reasoning_content": "", "content": ""}, {**OLD, "reasoning": ""}],
    "all mixed": [NEW, {**OLD, **NEW}],
}
REPORTS = (
    "vllm-project/vllm#27755", "vllm-project/vllm#33402", "vllm-project/vllm#50624",
    "BerriAI/litellm#26501", "BerriAI/litellm#20246", "open-webui/open-webui#24697",
    "open-webui/open-webui#23260", "vllm-project/router#115",
)  # fmt: skip


@case(15, *REPORTS)
@pytest.mark.parametrize("deltas", DELTAS.values(), ids=DELTAS)
def test_the_thinking_is_read_from_either_field_and_once(deltas: list[dict[str, Any]]) -> None:
    """Catches reading one field's name only, and adding up the same text of both."""
    choices = [{**TAIL, "finish_reason": None, "delta": delta} for delta in deltas]
    answer = {**TAIL, "delta": {"content": "12.", "reasoning": None}}
    reader = ChatReader(Chat({"messages": ASKED}, POLICY.thinking), "")
    assert text_of(events([wire(*choices, answer)], reader)) == "<think>Hm.Hm.</think>12."


NAMES = ("reasoning", "reasoning_content", "both")


@case(15, *REPORTS)
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(NAMES[0], NAMES[1]), (NAMES[1], NAMES[0]), (NAMES[2], NAMES[0]), (NAMES[0], NAMES[2])],
)
async def test_the_thinking_is_told_in_the_field_that_the_policy_names(
    stage: Stage, theirs: Any, ours: str
) -> None:
    """Catches passing an engine's field on: its clients then lose the thinking silently."""
    large, small = pair_of(FakeHosted)
    for engine in (large, small):
        engine.reasoning = theirs  # type: ignore[attr-defined]
    thinking = {"field": ours}
    served = await served_by(stage, large, small, HOSTED, thinking=thinking, cues={"words": []})
    mode = {"relaygen": {"mode": "large"}}
    reply = await stream(served, extra_body=mode)
    fields = {"reasoning", "reasoning_content"} if ours == "both" else {ours}
    for field in ("reasoning", "reasoning_content"):
        assert reply.text(field) == (REASONING if field in fields else "")
    assert reply.text("content") == ANSWER


# ---- an engine's own split ----------------------------------------------------------------------


class Misjudging(FakeVllm):
    """Its parser takes all that comes for an answer, or for a thought, whatever it is."""

    thinks = False

    def reply(self, request: Request) -> Any:
        reply = super().reply(request)
        if isinstance(reply, ChatReply):
            reply.parts = _All("reasoning" if self.thinks else "content")
        return reply


class _All(Parts):
    def __init__(self, field: str) -> None:
        super().__init__(False, field)
        self._name = field

    def _one(self, token: Any) -> str:
        return self._name


HISTORY = [*USER, {"role": "assistant", "content": "<think>Old.</think>Old."}, *USER]


@case(16, "vllm-project/vllm#32490")
@pytest.mark.parametrize("opens", ["", "<think>\n"])
@SELF_HOSTED
async def test_an_earlier_turns_thinking_says_nothing_of_the_new_one(
    stage: Stage, dialect: Dialect, opens: str
) -> None:
    """Catches a search of the whole prompt for the closing tag."""
    tokens = (opens, *STORY[1:]) if opens else STORY
    large, small = pair_of(dialect, *tokens, opens=opens)
    served = await stage.pair(large, small)
    assert await told(stage, served, messages=HISTORY) == (REASONING, ANSWER)
    assert any("<think>Old.</think>" in prompt for prompt in small.prompts())


@case(16, "vllm-project/vllm#32490")
async def test_a_parser_that_calls_new_thoughts_an_answer_is_not_believed(stage: Stage) -> None:
    """Catches `delta.content` taken for the answer wherever the generation stands."""
    served = await served_by(stage, *pair_of(Misjudging), BY_CHAT)
    assert await told(stage, served, messages=HISTORY) == (REASONING, ANSWER)


@case(16, "vllm-project/vllm#32490")
async def test_a_closing_tag_that_a_parser_swallowed_still_closes_the_thinking(
    stage: Stage,
) -> None:
    """Catches thinking that goes on to the end, as the tag was the first token of a decode."""
    large, small = pair_of(FakeVllm)
    for engine in (large, small):
        engine.reasoning_parser = True  # type: ignore[attr-defined]
    served = await served_by(stage, large, small, BY_CHAT)
    assert await told(stage, served, messages=HISTORY) == (REASONING, ANSWER)


@case(17, "sgl-project/sglang#17065")
async def test_a_parser_that_calls_the_answer_a_thought_is_not_believed(stage: Stage) -> None:
    """Catches `reasoning_content` taken for thinking after the thinking was closed."""
    large, small = pair_of(Misjudging)
    small.thinks = True  # type: ignore[attr-defined]
    served = await served_by(stage, large, small, BY_CHAT, cues={"words": []})
    assert await told(stage, served) == (REASONING, ANSWER)
    assert prefixes(large, small) == ["", f"<think>{REASONING}</think>"]


@case(17, "sgl-project/sglang#17065")
async def test_sglang_goes_on_by_chat_with_no_parser_between(stage: Stage) -> None:
    """Catches leaving `separate_reasoning` on, which files an answer gone on with as a thought."""
    large, small = pair_of(FakeSglang)
    for engine in (large, small):
        engine.force_reasoning = True  # type: ignore[attr-defined]
    served = await served_by(stage, large, small, BY_CHAT)
    assert await told(stage, served) == (REASONING, ANSWER)
    decodes = [*large.decodes, *small.decodes]
    assert all(decode.body["separate_reasoning"] is False for decode in decodes)


@case(17, "sgl-project/sglang#12140")
@pytest.mark.parametrize("backend", [{}, BY_CHAT], ids=["completions", "chat"])
async def test_a_segment_of_no_tokens_goes_back_to_the_large_model(
    stage: Stage, backend: dict[str, Any]
) -> None:
    """Catches `stop` after nothing taken for the end of the generation."""
    large, small = pair_of(FakeVllm)
    small.script = lambda prompt: []
    served = await served_by(stage, large, small, backend)
    reply = await ask(served)
    message = reply["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (REASONING, ANSWER)
    assert len(small.decodes) == 3  # two sentences, and the answer
    assert reply["usage"]["relaygen"]["small_tokens"] == 0


# ---- going on by chat, where nothing else is left -----------------------------------------------

PREFILL = ("ggml-org/llama.cpp#20861", "ggml-org/llama.cpp#21889", "ggml-org/llama.cpp#15404")


@case(18, *PREFILL)
async def test_a_raw_prompt_is_preferred_to_an_unfinished_message(stage: Stage) -> None:
    """Catches going on by chat where the server refuses every message begun."""
    large, small = pair_of(FakeLlamaCpp)
    for engine in (large, small):
        engine.refuses_prefill = True  # type: ignore[attr-defined]
    served = await stage.pair(large, small)
    assert await told(stage, served) == (REASONING, ANSWER)
    assert {decode.path for decode in [*large.decodes, *small.decodes]} == {COMPLETIONS}


@case(18, *PREFILL)
async def test_a_server_that_refuses_messages_begun_is_told_before_any_request(
    stage: Stage,
) -> None:
    """Catches finding out from the first handoff's 400."""
    large, small = pair_of(FakeLlamaCpp)
    large.refuses_prefill = True  # type: ignore[attr-defined]
    served = await served_by(stage, large, small, BY_CHAT)
    status, ready = await get(served, "/readyz")
    assert (status, ready["policies"]["pair"]["ready"]) == (503, False)
    assert "continuation: completions" in ready["policies"]["pair"]["error"]
    assert (await post(served)).status == 503
    assert large.decodes == []


@case(18, "ggml-org/llama.cpp#23089", "huggingface/transformers#45896")
async def test_llamacpp_is_told_which_field_to_go_on_with(stage: Stage) -> None:
    """Catches an open thought sent as content, which the template closes before it goes on."""
    large, small = pair_of(FakeLlamaCpp)
    for engine in (large, small):
        engine.think_tags = ("<think>", "</think>")
    served = await served_by(stage, large, small, BY_CHAT)
    assert await told(stage, served) == (REASONING, ANSWER)
    fields = [decode.body["continue_final_message"] for decode in small.decodes]
    assert fields == ["reasoning_content", "reasoning_content", "content"]


@case(19, "ls1intum/edutelligence#853")
async def test_every_continuation_says_that_no_new_turn_begins(stage: Stage) -> None:
    """Catches an assistant message without the flags: a new answer is glued on."""
    large, small = pair_of(FakeVllm)
    served = await served_by(stage, large, small, BY_CHAT)
    assert await told(stage, served) == (REASONING, ANSWER)
    going_on = [d.body for d in [*large.decodes, *small.decodes] if len(d.body["messages"]) > 1]
    flags = [(b["continue_final_message"], b["add_generation_prompt"]) for b in going_on]
    assert flags == [(True, False)] * 5


@case(19, "ls1intum/edutelligence#853")
@pytest.mark.parametrize(("does", "ready"), [("new_turn", False), ("continues", True)])
async def test_whether_a_chat_goes_on_is_tried_before_it_is_relied_on(
    stage: Stage, does: Any, ready: bool
) -> None:
    """Catches an API believed to go on with a last message because it answers 200."""
    large, small = pair_of(FakeHosted)
    large.prefill = does  # type: ignore[attr-defined]
    served = await served_by(stage, large, small, HOSTED)
    assert (await get(served, "/readyz"))[1]["policies"]["pair"]["ready"] is ready


@case(19, "ls1intum/edutelligence#853")
@pytest.mark.parametrize("theirs", ["inline", "reasoning_content"])
async def test_a_chat_that_repeats_the_message_goes_on_with_it(stage: Stage, theirs: Any) -> None:
    """Catches the message told back taken for new text."""
    large, small = pair_of(FakeHosted)
    for engine in (large, small):
        engine.prefill, engine.reasoning = "echoes", theirs  # type: ignore[attr-defined]
    served = await served_by(stage, large, small, HOSTED)
    assert await told(stage, served) == (REASONING, ANSWER)


# ---- exactly what was written -------------------------------------------------------------------

BLANKS = {
    "after a blank line": ("<think>", "So", " it", ".\n\n", "So", " ok", ".", "</think>", "Fine"),
    "after a blank": ("<think>", "So ", "it ", "is. ", " So ", " ok.\n", "</think>", "\n", "Fine"),
}


def forms() -> Iterator[Any]:
    for name, backend in {"completions": {}, "chat": BY_CHAT}.items():
        for vocabularies in (1, 2):
            yield pytest.param(backend, vocabularies, id=f"{name}-{vocabularies}")


@case(
    20, "vllm-project/vllm#9547", "huggingface/transformers#34214",
    "huggingface/transformers#34253", "huggingface/transformers#35433",
    "huggingface/transformers#36404",
)  # fmt: skip
@pytest.mark.parametrize("tokens", BLANKS.values(), ids=BLANKS)
@pytest.mark.parametrize(("backend", "vocabularies"), list(forms()))
async def test_no_blank_is_lost_or_doubled_where_one_model_takes_over(
    stage: Stage, backend: dict[str, Any], vocabularies: int, tokens: tuple[str, ...]
) -> None:
    """Catches a prefix that is stripped, by the template or by ourselves, after it was told."""
    large, small = pair_of(FakeVllm, *tokens, vocabularies=vocabularies)
    served = await served_by(
        stage, large, small, backend, cues={"words": ["So"]}, thinking={"field": "inline"}
    )
    assert await told(stage, served) == ("", "".join(tokens))
    assert len(small.decodes) == 3
    assert all("".join(tokens).startswith(prefix) for prefix in prefixes(large, small))
    if backend or vocabularies == 2:
        assert not any(prefix[-1:].isspace() for prefix in prefixes(large, small))


@case(21, "PrimeIntellect-ai/verifiers#179", "TIGER-AI-Lab/verl-tool#91")
@pytest.mark.parametrize("template", ["qwen3", "r1"])
async def test_a_template_that_rewrites_thoughts_is_found_out_at_start(
    stage: Stage, template: Any
) -> None:
    """Catches trusting `continue_final_message` whatever the template does with the message."""
    large, small = pair_of(FakeVllm)
    large.template = small.template = template
    served = await served_by(stage, large, small, BY_CHAT)
    status, ready = await get(served, "/readyz")
    assert (status, ready["policies"]["pair"]["ready"]) == (503, False)
    assert "template rewrites the message" in ready["policies"]["pair"]["error"]


@case(21, "PrimeIntellect-ai/verifiers#179", "TIGER-AI-Lab/verl-tool#91")
@pytest.mark.parametrize("template", ["qwen3", "r1"])
@SELF_HOSTED
async def test_a_raw_prompt_needs_nothing_of_such_a_template(
    stage: Stage, dialect: Dialect, template: Any
) -> None:
    """Catches the text so far put through the template as a message."""
    large, small = pair_of(dialect, vocabularies=2)
    large.template = small.template = template
    assert await told(stage, await stage.pair(large, small)) == (REASONING, ANSWER)
    assert not large.asked(CHAT)


# ---- begin tokens and the large model's tokens --------------------------------------------------


@case(22, "vllm-project/vllm#2012", "ggml-org/llama.cpp#7107", "LiveCodeBench/LiveCodeBench#146")
@pytest.mark.parametrize("system", ["", "<bos>"], ids=["bare template", "template with BOS"])
@pytest.mark.parametrize("vocabularies", [1, 2])
@pytest.mark.parametrize("dialect", [FakeVllm, FakeLlamaCpp, FakeSglang, FakeTgi])
async def test_a_rendered_prompt_has_no_second_begin_token(
    stage: Stage, dialect: Dialect, vocabularies: int, system: str
) -> None:
    """Catches a rendered prompt sent as text with the tokenizer's default of adding one."""
    large, small = pair_of(dialect, vocabularies=vocabularies, system=system)
    for engine in (large, small):
        engine.tokenizer.bos = engine.tokenizer.id_of("<bos>")
    assert await told(stage, await stage.pair(large, small)) == (REASONING, ANSWER)
    written_by_template = dialect in (FakeVllm, FakeSglang) and not system
    once = 0 if written_by_template else 1
    for engine in (large, small):
        for decode in engine.decodes:
            assert engine.prompt_of(decode).count(engine.tokenizer.bos) == once


FRAN = ("<think>", "The", " capital", " of", " Fr", "an", "ce", ".", "</think>", "Fine")
SO = ("<think>", "Fine", ".", " So", " ", "two", ".", "</think>", "Fine")


@case(23, "karpathy/llama2.c#180", "ggml-org/llama.cpp#5765", "ggml-org/llama.cpp#24247")
@pytest.mark.parametrize(("tokens", "cue", "kept"), [(FRAN, "Fran", 6), (SO, "So", 4)])
async def test_a_handoff_sends_the_tokens_that_the_large_model_wrote(
    stage: Stage, tokens: tuple[str, ...], cue: str, kept: int
) -> None:
    """Catches ids that come of the text: " Fr"+"an" would be another token, " " would join on."""
    large, small = pair_of(FakeVllm, *tokens)
    cues = {"words": [cue], "match": "substring"} if cue == "Fran" else {"words": [cue]}
    await ask(await stage.pair(large, small, cues=cues))
    head = small.tokenizer.encode(small.rendered(USER))
    sent = small.decodes[0].body["prompt"]
    assert sent == head + [small.tokenizer.id_of(token) for token in tokens[:kept]]


@case(23, "karpathy/llama2.c#180", "ggml-org/llama.cpp#5765", "ggml-org/llama.cpp#24247")
@pytest.mark.parametrize("backend", [{}, BY_CHAT], ids=["completions", "chat"])
async def test_a_blank_at_the_end_of_a_text_is_left_for_the_next_model(
    stage: Stage, backend: dict[str, Any]
) -> None:
    """Catches a prefix "So " that no tokenizer goes on from well."""
    large, small = pair_of(FakeVllm, *SO[:3], " So ", *SO[5:], vocabularies=2)
    served = await served_by(stage, large, small, backend, cues={"words": ["So"]})
    assert await told(stage, served) == ("Fine. So two.", "Fine")
    assert prefixes(small)[0] == "<think>Fine. So"
