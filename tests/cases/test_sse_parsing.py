"""Event streams: cut bytes, any line end, noise, usage chunks, errors, and streams that break."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from gateway.engines.chat import Chat, ChatReader
from gateway.engines.served_tokenizer import TokenIdsReader
from relaygen.events import DecodeChunk, DecodeFinished, Event
from tests.cases import case
from tests.cases.memory import ASKED, POLICY, events
from tests.cases.support import BY_CHAT, Answer, pair_of, post, served_by
from tests.gateway.fakes import Error, FakeVllm, Fin, Gate, Raw, Reset, writes
from tests.gateway.support import (
    ANSWER,
    NO_RESUME,
    REASONING,
    STORY,
    Stage,
    backends_of,
    leaving,
    policy_of,
    within,
)

WAIT_S = 5.0
DONE = b"data: [DONE]\n\n"
TAIL = {"index": 0, "delta": {}, "text": "", "finish_reason": "stop"}


def chat_reader() -> ChatReader:
    return ChatReader(Chat({"messages": ASKED}, POLICY.thinking), "")


def says(text: str) -> dict[str, Any]:
    """A chunk as both endpoints have it."""
    return {"index": 0, "delta": {"content": text}, "text": text, "finish_reason": None}


def wire(*choices: dict[str, Any], end: bytes = b"\n") -> bytes:
    """The choices' events and [DONE], each line ended by `end`."""
    data = [json.dumps({"choices": [c]}, ensure_ascii=False).encode() for c in choices]
    return b"".join(b"data: " + one + end + end for one in [*data, b"[DONE]"])


def text_of(told: list[Event]) -> str:
    return "".join(p.text for e in told if isinstance(e, DecodeChunk) for p in e.pieces)


def breaks(stage: Stage, *acts: Any) -> Any:
    """Served by a large engine that does this and a small one that is well; a break is the end."""
    return stage.pair(FakeVllm(writes(*acts), model="big"), FakeVllm(model="tiny"), NO_RESUME)


# ---- bytes --------------------------------------------------------------------------------------


@case(
    1,
    "xberg-io/liter-llm#152",
    "api7/aisix#111",
    "musistudio/claude-code-router#1672",
    "ggml-org/llama.cpp#28926",
)
@pytest.mark.parametrize("reader", [TokenIdsReader, chat_reader])
def test_a_character_cut_anywhere_by_the_network_comes_whole(reader: Any) -> None:
    """Catches decoding each network chunk by itself, with errors raised, replaced or ignored."""
    whole = wire(says("北"), says("🎉é"), TAIL)
    for at in range(1, len(whole)):
        assert text_of(events([whole[:at], whole[at:]], reader())) == "北🎉é", at


@case(1, "xberg-io/liter-llm#152")
async def test_half_a_character_waits_for_the_other_half(stage: Stage) -> None:
    """Catches decoding what a read brought before the line is whole."""
    chunk = json.dumps({"choices": [{**says("北"), "token_ids": [1]}]}, ensure_ascii=False)
    event, gate = b"data: " + chunk.encode() + b"\n\n", Gate()
    at = event.rindex("北".encode()) + 1  # in the field that is read
    large = FakeVllm(writes("first", Raw(event[:at]), gate, Raw(event[at:])), model="big")
    large.in_one_write = True  # all up to the gate: half a character has come when "first" has
    served = await stage.pair(large, FakeVllm(model="tiny"))
    async with leaving(served.url, stream=True) as (reader, _):
        await within(WAIT_S, reader.readuntil(b"first"))
        await within(WAIT_S, gate.reached.wait())
        gate.opened.set()
        rest = await within(WAIT_S, reader.readuntil(b"[DONE]"))
    assert '"content":"北"'.encode() in rest
    assert "\ufffd".encode() not in rest


@case(3, "openai/openai-node#2309", "Continuum-AI-Corp/OrcaRouter-Lite#98")
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_an_event_with_any_line_end_comes_once_wherever_it_is_cut(end: bytes) -> None:
    r"""Catches a search for \n\n, and a cut \r\n taken for two line ends."""
    whole = wire(says("A"), says("B"), TAIL, end=end)
    whole = whole.replace(b"[{", b"[" + end + b"data: {")  # its JSON over two lines
    for at in range(len(whole)):
        told = events([whole[:at], whole[at:]], TokenIdsReader())
        assert text_of(told) == "AB", at
        assert told[-1] == DecodeFinished("stop")


@case(3, "openai/openai-node#2309", "Continuum-AI-Corp/OrcaRouter-Lite#98")
@pytest.mark.parametrize("ends", [b"\r\n\r\n", b"\r\r", b"\n\r\n", b"\r\n\n", b"\r\n\r"])
async def test_an_event_is_told_at_once_whatever_ends_it(stage: Stage, ends: bytes) -> None:
    r"""Catches holding an event back until a \n\n or the next event comes."""
    chunk = json.dumps({"choices": [{**says("at once"), "token_ids": [1]}]}).encode()
    served = await breaks(stage, Raw(b"data: " + chunk + ends), Gate())
    async with leaving(served.url, stream=True) as (reader, _):
        await within(WAIT_S, reader.readuntil(b"at once"))


# ---- what is no event ---------------------------------------------------------------------------

NOISE = [b":\n\n", b": ping\n\n", b"data:\n\n", b": OPENROUTER PROCESSING\n\n", b"data: \n\n"]


@case(
    4, "coder/coder#28185", "mnfst/llm-gateway#2053", "omnigent-ai/omnigent#1474",
    "openai/openai-python#2722",
)  # fmt: skip
async def test_comments_and_empty_events_are_swallowed(stage: Stage) -> None:
    """Catches parsing an empty event as JSON, and a comment sent on as if it were data."""
    acts = [act for noise in NOISE for act in (Raw(noise), " word")]
    served = await breaks(stage, "One", *acts)
    answer = await post(served, stream=True)
    assert answer.text("content") == "One" + " word" * len(NOISE)
    assert b"PROCESSING" not in answer.wire
    assert all(line.startswith(b"data: ") for line in answer.wire.split(b"\n") if line)
    assert answer.events[-1] == "[DONE]"


@case(4, "openai/openai-python#2722", "theopenco/llmgateway#2334")
async def test_a_sign_of_life_is_a_comment_with_no_blank_line_after_it(stage: Stage) -> None:
    """Catches a keep-alive that ends in a blank line: older SDKs read an empty event from it."""
    gate = Gate()
    large = FakeVllm(writes("One", gate, " two"), model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"), {"timeouts": {"keep_alive": 0.02}})
    async with leaving(served.url, stream=True) as (reader, _):
        first = await within(WAIT_S, reader.readuntil(b"One"))
        silence = await within(WAIT_S, reader.readuntil(b": ping\n"))
        gate.opened.set()
        rest = await within(WAIT_S, reader.readuntil(b"[DONE]"))
    assert b": ping\n" in silence
    assert b" two" in rest
    unchunked = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", first + silence + rest)
    assert b": ping\n\n" not in unchunked


# ---- usage --------------------------------------------------------------------------------------

USAGE = {"prompt_tokens": 1, "completion_tokens": 8, "total_tokens": 9}


@case(5, "BerriAI/litellm#32519", "Portkey-AI/gateway#1629")
@pytest.mark.parametrize("reader", [TokenIdsReader, chat_reader])
@pytest.mark.parametrize("choices", [{"choices": []}, {"choices": None}, {}])
def test_a_usage_chunk_without_choices_is_counted(reader: Any, choices: dict[str, Any]) -> None:
    """Catches `choices[0]` of a chunk that has none."""
    usage = json.dumps({**choices, "usage": USAGE}).encode()
    whole = wire(says("One"), TAIL).removesuffix(DONE) + b"data: " + usage + b"\n\n" + DONE
    assert events([whole], reader())[-1] == DecodeFinished("stop", 8)


@case(6, "Arthur-Ficial/apfel#100")
@pytest.mark.parametrize("backend", [{}, BY_CHAT], ids=["completions", "chat"])
@pytest.mark.parametrize("asked", [True, False])
async def test_usage_is_asked_of_every_engine_and_told_once_if_wanted(
    stage: Stage, asked: bool, backend: dict[str, Any]
) -> None:
    """Catches passing the client's stream_options on, or every segment's usage back."""
    large, small = pair_of(FakeVllm)
    served = await served_by(stage, large, small, backend)
    options = {"stream_options": {"include_usage": True}} if asked else {}
    answer = await post(served, stream=True, **options)
    decodes = [*large.decodes, *small.decodes]
    assert len(decodes) == 6
    assert all(d.body["stream_options"] == {"include_usage": True} for d in decodes)
    chunks = answer.events[:-1]
    told = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]
    assert told == ([len(STORY) + 1] if asked else [])
    assert asked or all(chunk["choices"] for chunk in chunks)


# ---- errors and broken streams ------------------------------------------------------------------


@case(7, "BerriAI/litellm#40578", "ggml-org/llama.cpp#14566", "openai/openai-python#1160")
@pytest.mark.parametrize("streaming", [True, False])
async def test_an_error_as_the_first_event_is_an_http_error(stage: Stage, streaming: bool) -> None:
    """Catches dropping an event that has no choices, and calling what is left complete."""
    answer = await post(await breaks(stage, Error("queue full", 429)), stream=streaming)
    assert answer.status == 429
    assert "queue full" in answer.error["message"]


@case(7, "BerriAI/litellm#40578", "ggml-org/llama.cpp#14566", "openai/openai-python#1160")
async def test_an_error_after_some_text_is_an_error_event_and_no_end(stage: Stage) -> None:
    """Catches an error in a 200 dropped, and its [DONE] taken for a good end."""
    answer = await post(await breaks(stage, "One", Error("queue full", 429)), stream=True)
    assert answer.text("content") == "One"
    assert "queue full" in answer.events[-1]["error"]["message"]
    assert not answer.looks_complete


@case(7, "BerriAI/litellm#40578")
@pytest.mark.parametrize("streaming", [True, False])
async def test_an_error_before_any_text_is_retried_on_another_replica(
    stage: Stage, streaming: bool
) -> None:
    """Catches an engine's failure that counts only when it comes as a status."""
    full = await stage.engine(FakeVllm(writes(Error("queue full", 429)), model="big"))
    well = await stage.engine(FakeVllm(writes("fine"), model="big"))
    small = await stage.engine(FakeVllm(model="tiny"))
    backends = {**backends_of(full, small), "large": {"urls": [full.url, well.url]}}
    served = await stage.gateway({"backends": backends}, policy_of(full, small))
    answer = await post(served, stream=streaming)
    assert answer.status == 200
    assert b'"fine"' in answer.wire
    assert (len(full.decodes), len(well.decodes)) == (1, 1)


BREAKS = pytest.mark.parametrize("how", [Reset(), Fin()], ids=["reset", "fin"])


@case(9, "BerriAI/litellm#33404", "maximhq/bifrost#5546")
@BREAKS
@pytest.mark.parametrize("backend", [{}, BY_CHAT], ids=["completions", "chat"])
async def test_a_broken_stream_is_never_made_a_success(
    stage: Stage, how: Any, backend: dict[str, Any]
) -> None:
    """Catches a `finish_reason: stop` and [DONE] made up for a stream that just ended."""
    large, small = pair_of(FakeVllm)
    large.script = writes("One", " two", " three", how)
    served = await served_by(stage, large, small, backend)
    answer = await post(served, stream=True, relaygen={"resume": False})
    assert answer.text("content") == "One two three"
    assert answer.events[-1]["error"]["type"] == "upstream_error"
    assert not answer.looks_complete


@case(9, "BerriAI/litellm#33404", "maximhq/bifrost#5546")
@BREAKS
@pytest.mark.parametrize("streaming", [True, False])
async def test_a_stream_that_breaks_after_the_role_alone_is_an_http_error(
    stage: Stage, how: Any, streaming: bool
) -> None:
    """Catches a role chunk that counts as a reply begun, and an empty reply as a complete one."""
    large, small = pair_of(FakeVllm)
    large.script = writes(how)
    answer = await post(await served_by(stage, large, small, BY_CHAT), stream=streaming)
    assert len(large.decodes) >= 1
    assert answer.status == 502


@case(9, "BerriAI/litellm#33404")
@BREAKS
async def test_a_reply_in_one_piece_never_hides_a_broken_stream(stage: Stage, how: Any) -> None:
    """Catches what was collected so far given out as the whole reply."""
    assert (await post(await breaks(stage, "One", " two", how))).status == 502


# ---- headers ------------------------------------------------------------------------------------


def is_unbuffered(answer: Answer) -> bool:
    told = answer.headers["Content-Type"], answer.headers.get("Cache-Control")
    live = told == ("text/event-stream; charset=utf-8", "no-cache")
    return live and answer.headers.get("X-Accel-Buffering") == "no"


@case(14, "BerriAI/litellm#29557", "ggml-org/llama.cpp#20872")
async def test_a_relayed_stream_tells_proxies_not_to_buffer_it(stage: Stage) -> None:
    """Catches a stream that nginx hands out only when it is over."""
    assert is_unbuffered(await post(await stage.pair(*pair_of(FakeVllm)), stream=True))


@case(14, "BerriAI/litellm#29557", "ggml-org/llama.cpp#20872")
async def test_a_stream_passed_through_tells_proxies_not_to_buffer_it(stage: Stage) -> None:
    """Catches headers that are only set on streams of our own making."""
    large, small = pair_of(FakeVllm)
    served = await served_by(stage, large, small, BY_CHAT)
    answer = await post(served, stream=True, stop_token_ids=[7])
    assert answer.headers["x-relaygen-mode"] == "passthrough"
    assert is_unbuffered(answer)


@case(14, "BerriAI/litellm#29557")
async def test_an_upstream_content_type_may_have_parameters(stage: Stage) -> None:
    """Catches a comparison of the whole header with "text/event-stream"."""
    large, small = pair_of(FakeVllm)
    served = await served_by(stage, large, small, BY_CHAT)
    answer = await post(served, stream=True, tools=[{"type": "function", "function": {}}])
    assert answer.text("reasoning_content") == REASONING
    assert answer.text("content") == ANSWER
