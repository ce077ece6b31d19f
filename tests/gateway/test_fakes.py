"""The wire formats that the fakes reproduce, asked for directly: what adapters are held against."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.gateway.fakes import Error, FakeSglang, FakeTgi, Gate, Tokenizer, story, writes
from tests.gateway.fakes.asking import ASK, BEGUN, after, running
from tests.gateway.fakes.engines import CHAT

STORY = ("<think>", "Six", " plus", " six", ".", "</think>", "It", " is", " 1", "2", ".")


# ---- SGLang -------------------------------------------------------------------------------------


async def test_sglang_streams_ids_and_legacy_logprobs() -> None:
    engine = FakeSglang(story(*STORY), tokenizer=Tokenizer(bos=True))
    engine.tokens_per_chunk = 3
    usage = {"include_usage": True}
    fields = {"rid": "r-1", "return_token_ids": True, "logprobs": 0, "stream_options": usage}
    async with running(engine) as ask:
        reply = await ask.stream("/v1/completions", prompt=BEGUN, max_tokens=50, **fields)
    first, *_, last, total = reply.chunks
    assert first["id"] == "r-1"
    assert first["choices"][0]["prompt_token_ids"][0] == engine.tokenizer.bos
    assert first["choices"][0]["logprobs"] == {
        "text_offset": [-1] * 3,
        "token_logprobs": [-0.25] * 3,
        "tokens": ["<think>", "Six", " plus"],
        "top_logprobs": [],
    }
    assert "prompt_token_ids" not in last["choices"][0]
    assert last["choices"][0]["matched_stop"] == engine.tokenizer.eos
    ids = [i for choice in reply.choices for i in choice["token_ids"]]
    assert engine.tokenizer.decode(ids) == "".join(STORY) + "<|im_end|>"
    assert total["choices"] == []
    assert total["usage"]["completion_tokens"] == len(STORY) + 1
    assert reply.data[-1] == "[DONE]"


async def test_sglang_holds_back_the_text_of_half_characters_but_not_their_ids() -> None:
    engine = FakeSglang(writes(*[bytes([byte]) for byte in "é".encode()]))
    async with running(engine) as ask:
        reply = await ask.stream("/v1/completions", prompt="x", return_token_ids=True, logprobs=1)
    assert [choice["text"] for choice in reply.choices] == ["", "é", ""]
    assert [len(choice["token_ids"]) for choice in reply.choices] == [1, 1, 1]
    assert reply.choices[0]["logprobs"]["tokens"] == ["Ã"]


async def test_sglang_cuts_stop_texts_from_the_last_chunk_only() -> None:
    engine = FakeSglang(writes(*STORY))
    async with running(engine) as ask:
        reply = await ask.stream("/v1/completions", prompt="x", stop=[" is 1"])
    assert "".join(choice["text"] for choice in reply.choices).endswith("It is")
    assert reply.choices[-1]["matched_stop"] == " is 1"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ""}, "Prompt cannot be empty"),
        ({"max_tokens": 0}, "max_tokens must be positive"),
        ({"stop": ["x"] * 33}, "stop must have at most 32 items, got 33"),
        ({"max_tokens": 5000}, "Requested token count exceeds"),
        ({"prompt": [7] * 5000}, "The input (5000 tokens) is longer than"),
    ],
)
async def test_sglangs_http_errors_are_flat(fields: dict[str, Any], message: str) -> None:
    async with running(FakeSglang()) as ask:
        reply = await ask.stream("/v1/completions", **{"prompt": "x", **fields})
    assert reply.status == 400
    assert set(reply.json) == {"object", "message", "type", "param", "code"}
    assert reply.json["object"] == "error"
    assert reply.json["message"].startswith(message)


async def test_sglangs_errors_in_streams_are_nested_and_overload_is_one() -> None:
    engine = FakeSglang(writes("ok", Error("gone", 500)))
    async with running(engine) as ask:
        reply = await ask.stream("/v1/completions", prompt="x")
        engine.overloaded = True
        full = await ask.stream("/v1/completions", prompt="x")
        whole = await ask("/v1/completions", prompt="x")
    assert reply.chunks[-1]["error"]["message"] == "gone"
    assert reply.data[-1] == "[DONE]"
    assert full.status == 200
    assert full.chunks[0]["error"]["code"] == 503
    assert full.data[1:] == ["[DONE]"]
    assert whole.status == whole.json["code"] == 503


@pytest.mark.parametrize("aborts", [True, False])
async def test_sglang_frees_a_decode_by_abort_or_late(aborts: bool) -> None:
    gate = Gate()
    engine = FakeSglang(writes("one", gate))
    engine.disconnect_s = 0.2
    async with running(engine) as ask:
        async with ask.session.post(
            "/v1/completions", json={"prompt": "x", "stream": True, "rid": "r-1"}
        ) as response:
            await response.content.readuntil(b"\n\n")
        decode = await engine.decode()
        await decode.left.wait()
        assert engine.freed == {}
        if aborts:
            await ask("/abort_request", rid="unknown")
            await ask("/abort_request", rid="r-1", abort_all=False)
        assert await engine.freeing("r-1") == ("abort" if aborts else "disconnect")
    assert engine.aborts == (["unknown", "r-1"] if aborts else [])


async def test_sglangs_aborts_reach_all_ids_that_begin_alike() -> None:
    engine = FakeSglang(writes("one", Gate()))
    async with running(engine) as ask:
        streams = [
            asyncio.create_task(ask.stream("/v1/completions", prompt="x", rid=rid))
            for rid in ("r-1", "r-10", "r-2")
        ]
        await engine.decode(2)
        await ask("/abort_request", rid="r-1")
        ended = await asyncio.gather(*streams[:2])
        streams[2].cancel()
    assert [reply.finish for reply in ended] == ["abort", "abort"]
    assert ended[0].data[-1] == "[DONE]"
    assert set(engine.freed) == {"r-1", "r-10"}


async def test_sglang_goes_on_with_a_message_only_if_told_so() -> None:
    engine = FakeSglang(story(*STORY))
    async with running(engine) as ask:
        reply = await ask.stream(CHAT, messages=after("<think>Six"), continue_final_message=True)
        await ask.stream(CHAT, messages=after("<think>Six"))
        inline = await ask.stream(CHAT, messages=ASK, separate_reasoning=False)
        given = await ask(CHAT, messages=ASK, input_ids=engine.tokenizer.encode("<think>Six"))
    assert reply.text("reasoning_content") == " plus six."
    assert reply.text() == "It is 12."
    assert engine.prompts()[0] == BEGUN + "<think>Six"
    assert "<|im_start|>user\n<think>Six<|im_end|>" in engine.prompts()[1]
    assert inline.text() == "".join(STORY)
    assert engine.prompts()[3] == "<think>Six"
    assert given.json["choices"][0]["message"]["content"] == " plus six.</think>It is 12."


async def test_sglang_encodes_a_prefix_by_itself() -> None:
    engine = FakeSglang(opens="<think>A")
    fields = {"messages": after("B"), "continue_final_message": True}
    async with running(engine) as ask:
        apart = (await ask("/tokenize", **fields)).json
        engine.encodes_prefix_apart = False
        in_one = (await ask("/v1/tokenize", **fields)).json
    assert apart["count"] == in_one["count"] + 1
    assert engine.text_of(apart["tokens"]) == engine.text_of(in_one["tokens"])


async def test_sglangs_tokenize() -> None:
    engine = FakeSglang(tokenizer=Tokenizer(bos=True))
    async with running(engine) as ask:
        neither = await ask("/tokenize")
        text = (await ask("/tokenize", prompt="a b", add_special_tokens=False)).json
        back = (await ask("/detokenize", tokens=text["tokens"])).json
        kept = (await ask("/detokenize", tokens=text["tokens"], skip_special_tokens=False)).json
        engine.tokenize_takes_special = True
        older = (await ask("/tokenize", prompt="a b", add_special_tokens=False)).json
    assert neither.status == 400
    assert text["tokens"] == [engine.tokenizer.bos, *older["tokens"]]
    assert text["count"] == 3
    assert (back["text"], kept["text"]) == ("a b", "<bos>a b")


async def test_sglang_tells_what_it_is_without_health_checks() -> None:
    engine = FakeSglang(model="big", context=100)
    async with running(engine) as ask:
        [card] = (await ask.get("/v1/models")).json["data"]
        info = (await ask.get("/server_info")).json
        assert (await ask.get("/ready")).status == 200
        assert engine.health_checks == 0
        await ask.get("/health")
    assert (card["id"], card["owned_by"], card["max_model_len"]) == ("big", "sglang", 100)
    assert info["version"] == "0.5.23"
    assert engine.health_checks == 1


# ---- TGI ----------------------------------------------------------------------------------------


async def test_tgis_native_stream() -> None:
    engine = FakeTgi(story(*STORY), tokenizer=Tokenizer(bos=True))
    engine.tokens_per_chunk = 3
    parameters = {"top_n_tokens": 2, "details": True, "max_new_tokens": 50, "seed": 7}
    async with running(engine) as ask:
        reply = await ask("/generate_stream", inputs=BEGUN + "<think>Six", parameters=parameters)
    assert "[DONE]" not in reply.data
    assert engine.prompts() == ["<bos>" + BEGUN + "<think>Six"]
    first, *_, last = reply.chunks
    token = {"id": engine.tokenizer.id_of(" plus"), "text": " plus", "logprob": -0.25}
    assert first["token"] == {**token, "special": False}
    assert [len(chunk["top_tokens"]) for chunk in reply.chunks] == [2] * 10
    assert (first["generated_text"], first["details"]) == (None, None)
    assert last["token"]["special"] is True
    assert last["generated_text"] == " plus six.</think>It is 12."
    length = engine.tokenizer.encode(BEGUN + "<think>Six", special=True)
    made = {"finish_reason": "eos_token", "generated_tokens": 10, "seed": 7}
    assert last["details"] == {**made, "input_length": len(length)}


async def test_tgi_up_to_2_wrote_no_blank_after_data() -> None:
    engine = FakeTgi()
    engine.data_field = b"data:"
    async with running(engine) as ask:
        reply = await ask("/generate_stream", inputs="x")
    assert reply.content.startswith(b'data:{"index"')


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0}, "`temperature` must be strictly positive"),
    ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"top_k": 0}, "`top_k` must be strictly positive"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"max_new_tokens": 5000}, "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 1"),
]


@pytest.mark.parametrize(("parameters", "message"), WRONG)
async def test_tgi_answers_200_to_what_it_refuses(parameters: dict[str, Any], message: str) -> None:
    async with running(FakeTgi()) as ask:
        stream = await ask("/generate_stream", inputs="x", parameters=parameters)
        whole = await ask("/generate", inputs="x", parameters=parameters)
    assert stream.status == 200
    [event] = stream.chunks
    assert event["error"]["http_status_code"] == 422
    assert event["error"]["message"].startswith(f"Input validation error: {message}")
    assert whole.status == 422
    assert whole.json["error_type"] == "validation"


async def test_tgi_refuses_wrong_types_before_it_streams() -> None:
    async with running(FakeTgi()) as ask:
        reply = await ask("/generate_stream", inputs="x", parameters={"seed": -1})
        unknown = await ask("/generate_stream", inputs="x", parameters={"what": 1})
    assert reply.status == 422
    assert b"expected u64" in reply.content
    assert unknown.chunks[-1]["generated_text"] == "ok"


async def test_tgi_when_overloaded_or_asked_for_another_model() -> None:
    engine = FakeTgi()
    async with running(engine) as ask:
        lora = await ask(CHAT, model="big", messages=ASK)
        await ask(CHAT, model="tgi", messages=ASK, presence_penalty=0.5, temperature=0)
        engine.overloaded = True
        full = await ask("/generate", inputs="x")
    assert lora.status == 424
    assert engine.sampling[-1]["repetition_penalty"] == 2.5
    assert "temperature" not in engine.sampling[-1]
    assert full.status == 429
    assert full.json == {"error": "Model is overloaded", "error_type": "overloaded"}


async def test_tgis_chat_and_completions() -> None:
    engine = FakeTgi(story(*STORY))
    usage = {"include_usage": True}
    async with running(engine) as ask:
        chat = await ask.stream(
            CHAT, model="tgi", messages=after("<think>Six "), logprobs=True, stream_options=usage
        )
        text = await ask.stream("/v1/completions", model="tgi", prompt=BEGUN)
        whole = (await ask("/v1/completions", model="tgi", prompt=BEGUN)).json
    assert chat.text() == " plus six.</think>It is 12."
    assert set(chat.choices[0]["logprobs"]["content"][0]) == {"token", "logprob", "top_logprobs"}
    assert (chat.finish, chat.data[-1]) == ("stop", "[DONE]")
    assert chat.chunks[-1]["choices"] == []
    assert [c["finish_reason"] for c in text.choices] == [""] * 11 + ["eos_token"]
    assert text.choices[-1]["text"] == "<|im_end|>"
    assert text.chunks[-1]["usage"]["completion_tokens"] == 12
    assert whole["choices"][0] == {
        "index": 0,
        "text": "".join(STORY),
        "finish_reason": "stop",
        "logprobs": None,
    }


async def test_tgi_keeps_stop_texts_and_tells_them_apart() -> None:
    engine = FakeTgi(writes(*STORY))
    async with running(engine) as ask:
        reply = await ask(
            "/generate_stream", inputs="x", parameters={"stop": [" is"], "details": True}
        )
    assert reply.chunks[-1]["generated_text"].endswith("It is")
    assert reply.chunks[-1]["details"]["finish_reason"] == "stop_sequence"


async def test_tgis_tokenizers() -> None:
    engine = FakeTgi(tokenizer=Tokenizer(bos=True), context=100)
    async with running(engine) as ask:
        tokens = (await ask("/tokenize", inputs="a b")).json
        chat = (await ask("/chat_tokenize", messages=after("Six "))).json
        info = (await ask.get("/info")).json
    assert tokens[0]["id"] == engine.tokenizer.bos
    assert [(t["text"], t["start"], t["stop"]) for t in tokens] == [
        ("", 0, 0),
        ("a", 0, 1),
        (" b", 1, 3),
    ]
    assert chat["templated_text"] == BEGUN + "Six"
    ids = [token["id"] for token in chat["tokenize_response"]]
    assert engine.text_of(ids) == chat["templated_text"]
    assert info["max_total_tokens"] == 100
