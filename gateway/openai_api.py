"""OpenAI's wire format, the requests: what a body asks for, in our words. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import orjson

from gateway.errors import RequestError
from gateway.nesting import MAX_DEPTH, too_deep
from relaygen.events import Role
from relaygen.session import Limits

T = TypeVar("T")

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 32
MAX_STOP_CHARS = 4096
MAX_TOKEN_ID = 2**31 - 1
MAX_SEED = 2**62  # leaves room for the segments' own seeds below the engines' 2**63
MAX_CHOICES = 128
# What the prompt depends on, beside the messages.
_TEMPLATE_FIELDS = frozenset(
    {
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "parallel_tool_calls",
        "reasoning_effort",
        "tool_choice",
        "tools",
    }
)
_OURS = frozenset(
    {
        "include_stop_str_in_output",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "min_tokens",
        "model",
        "n",
        "prompt",
        "relaygen",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "top_logprobs",
        # Say nothing about how tokens are drawn; on /v1/completions some would mean something else.
        "echo",
        "best_of",
        "suffix",
        "functions",
        "function_call",
        "metadata",
        "modalities",
        "store",
        "user",
    }
)
# Bear on what follows the thinking, and need the parser or the grammar of a chat endpoint.
FORM_FIELDS: tuple[str, ...] = (
    "tools",
    "response_format",
    "structured_outputs",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "grammar",
    "json_schema",
)
# Fields that only one model's own endpoint can serve faithfully.
_WHOLE_FIELDS: tuple[str, ...] = (
    "audio",
    "functions",
    "prediction",
    "prompt_logprobs",
    "stop_token_ids",
    "suffix",
    "use_beam_search",
    "web_search_options",
)
# Name tokens by their ids.
_ID_FIELDS: tuple[str, ...] = ("allowed_token_ids", "logit_bias")

RawPrompt: TypeAlias = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """One relayed request. `sampling` and `template` travel on to the engines.

    `prompts` are the raw ones of /v1/completions, none in a chat; each is answered `n` times.
    `logprobs` is None where not asked for, else the number of alternatives. `form` is the field
    that asks for tools or structured output, if one does, `forms` all such. `whole` says why the
    large model must serve all of it, None where it can be relayed; `ids` names the field that has
    token ids in it. `resume` says whether it may outlive an engine that breaks.
    """

    chat: bool
    model: str
    stream: bool
    include_usage: bool
    limits: Limits
    sampling: dict[str, Any]
    template: dict[str, Any]
    logprobs: int | None
    trace: bool
    resume: bool
    mode: Literal["relay", "large", "small"]
    prompts: tuple[RawPrompt, ...]
    n: int
    echo: bool
    form: str | None
    forms: dict[str, Any]
    ids: str | None
    whole: str | None

    @property
    def solo(self) -> Role | None:
        return None if self.mode == "relay" else Role(self.mode)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that may write."""
        return tuple(Role) if self.solo is None else (self.solo,)

    @property
    def choices(self) -> int:
        return self.n * max(1, len(self.prompts))


def parse_object(content: bytes) -> dict[str, Any]:
    """The JSON object of a request's body."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"The body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError(f"The body must be a JSON object, not {_kind(body)}")
    if too_deep(content, body):
        raise RequestError(f"The body is nested too deeply: at most {MAX_DEPTH} levels")
    return body


def model_of(body: Mapping[str, Any]) -> str:
    model: str | None = _get(body, "model", str, None)
    if not model:
        raise RequestError("`model` is missing: name a policy or a model", param="model")
    return model


def parse_chat(body: Mapping[str, Any]) -> Ask:
    """A /v1/chat/completions body. RequestError names the field, the value and the remedy."""
    messages = _messages(body)
    logprobs = None
    if _get(body, "logprobs", bool, False):
        logprobs = _count(body, "top_logprobs", least=0, most=MAX_TOP_LOGPROBS) or 0
    limit = _count(body, "max_completion_tokens", least=1)
    template = {k: v for k, v in body.items() if k in _TEMPLATE_FIELDS and v not in (None, [])}
    return _ask(
        body,
        max_tokens=_count(body, "max_tokens", least=1) if limit is None else limit,
        template={"messages": messages, "add_generation_prompt": True, **template},
        logprobs=logprobs,
        prompts=(),
        form=_form(body),
        whole=_whole(body) or _content_reason(messages),
    )


def parse_completion(body: Mapping[str, Any]) -> Ask:
    """A /v1/completions body; without `max_tokens` it means 16, as it does in OpenAI's API."""
    prompts = _prompts(body.get("prompt"))
    whole = _whole(body) or _form(body)
    logprobs = _count(body, "logprobs", least=0, most=MAX_TOP_LOGPROBS)
    if logprobs is not None and _get(body, "echo", bool, False):
        whole = whole or "logprobs of the prompt (echo)"
    return _ask(
        body,
        max_tokens=_count(body, "max_tokens", least=1) or 16,
        template={},
        logprobs=logprobs,
        prompts=prompts,
        form=None,
        whole=whole,
    )


def _prompts(prompt: object) -> tuple[RawPrompt, ...]:
    """A text, token ids, or a list of either."""
    if isinstance(prompt, list) and prompt and all(isinstance(p, str | list) for p in prompt):
        return tuple(_raw_prompt(item) for item in prompt)
    return (_raw_prompt(prompt),)


def _raw_prompt(prompt: object) -> RawPrompt:
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt or not all(type(i) is int for i in prompt):
        message = (
            f"`prompt` must be a text, a list of token ids, or a list of such; {_shown(prompt)}"
        )
        raise RequestError(f"{message} is neither", param="prompt")
    if not all(0 <= item <= MAX_TOKEN_ID for item in prompt):
        raise RequestError("`prompt` has token ids that no vocabulary has", param="prompt")
    return tuple(prompt)


def _form(body: Mapping[str, Any]) -> str | None:
    for key in FORM_FIELDS:
        value = body.get(key)
        plain = key == "response_format" and isinstance(value, dict) and value.get("type") == "text"
        if value and not plain:
            return key
    return None


def _ask(
    body: Mapping[str, Any],
    *,
    max_tokens: int | None,
    template: dict[str, Any],
    logprobs: int | None,
    prompts: tuple[RawPrompt, ...],
    form: str | None,
    whole: str | None,
) -> Ask:
    stream = _get(body, "stream", bool, False)
    options = _get(body, "stream_options", dict, {})
    if options and not stream:
        raise RequestError("`stream_options` needs `stream: true`", param="stream_options")
    ours = _get(body, "relaygen", dict, {})
    if unknown := ours.keys() - {"mode", "resume", "trace"}:
        message = f"`relaygen` has the unknown key {min(unknown)!r}; known: mode, resume, trace"
        raise RequestError(message, param=f"relaygen.{min(unknown)}")
    mode: Any = ours.get("mode") or "relay"
    if mode not in ("relay", "large", "small"):
        message = f"`relaygen.mode` is {mode!r}; it must be relay, large or small"
        raise RequestError(message, param="relaygen.mode")
    n = _count(body, "n", least=1) or 1
    if n * max(1, len(prompts)) > MAX_CHOICES:
        message = f"`n` times the prompts is {n * max(1, len(prompts))}; at most {MAX_CHOICES}"
        raise RequestError(f"{message} choices are written at once", param="n")
    return Ask(
        chat=not prompts,
        model=model_of(body),
        stream=stream,
        include_usage=not stream or bool(options.get("include_usage")),
        limits=Limits(
            max_tokens=max_tokens,
            min_tokens=_count(body, "min_tokens", least=0),
            seed=_seed(body),
            stops=_stops(body),
            include_stop=_get(body, "include_stop_str_in_output", bool, False),
        ),
        sampling={
            key: value
            for key, value in body.items()
            if value is not None
            and key not in _OURS
            and key not in _TEMPLATE_FIELDS
            and key not in FORM_FIELDS
        },
        template=template,
        logprobs=logprobs,
        trace=_get(ours, "trace", bool, False),
        resume=_get(ours, "resume", bool, True),
        mode=mode,
        prompts=prompts,
        n=n,
        echo=bool(prompts) and _get(body, "echo", bool, False),
        form=form,
        forms={key: body[key] for key in FORM_FIELDS if body.get(key)},
        ids=next((key for key in _ID_FIELDS if body.get(key)), None),
        whole=whole,
    )


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if messages is None:
        raise RequestError("`messages` is missing: send a list of messages", param="messages")
    if not isinstance(messages, list) or not messages:
        message = f"`messages` must be a list of at least one message, not {_shown(messages)}"
        raise RequestError(message, param="messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"`messages[{i}]` must be an object with a `role`, not {_shown(message)}",
                param=f"messages[{i}]",
            )
    return [_with_reasoning(message) for message in messages]


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """An earlier turn with its thinking under both names: templates read one or the other."""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if message["role"] != "assistant" or not isinstance(reasoning, str):
        return message
    return {**message, "reasoning_content": reasoning, "reasoning": reasoning}


def _content_reason(messages: list[dict[str, Any]]) -> str | None:
    """Why the messages' content needs one model's own endpoint, if it does."""
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in ("text", "input_text", "refusal"):
                return f"a content part of type {kind}"
            if kind == "text" and not isinstance(part.get("text"), str):
                field = f"messages[{i}].content[{j}]"
                raise RequestError(f"`{field}` has no `text`", param=field)
    return None


def _whole(body: Mapping[str, Any]) -> str | None:
    if (_count(body, "best_of", least=1) or 1) > 1:
        return "best_of > 1"
    return next((key for key in _WHOLE_FIELDS if body.get(key)), None)


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        message = f"`stop` must be a text or a list of texts, not {_shown(stop)}"
        raise RequestError(message, param="stop")
    if len(stops) > MAX_STOPS or sum(map(len, stops)) > MAX_STOP_CHARS:
        message = f"`stop` may have {MAX_STOPS} texts of {MAX_STOP_CHARS} characters in all"
        raise RequestError(f"{message}; send fewer or shorter ones", param="stop")
    return tuple(s for s in stops if s)


def _seed(body: Mapping[str, Any]) -> int | None:
    seed: int | None = _get(body, "seed", int, None)
    if seed is not None and not -MAX_SEED <= seed <= MAX_SEED:
        message = f"`seed` is {seed}; it must be from {-MAX_SEED} to {MAX_SEED}"
        raise RequestError(message, param="seed")
    return seed


def _count(body: Mapping[str, Any], key: str, *, least: int, most: int | None = None) -> int | None:
    value: int | None = _get(body, key, int, None)
    if value is not None and (value < least or (most is not None and value > most)):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise RequestError(f"`{key}` is {value}; it must be {limits}", param=key)
    return value


def _get(body: Mapping[str, Any], key: str, kind: type[T], default: T | None) -> Any:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        names = {int: "an integer", bool: "true or false", str: "a text", dict: "an object"}
        raise RequestError(f"`{key}` must be {names[kind]}, not {_shown(value)}", param=key)
    return value


def _kind(value: object) -> str:
    kinds = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
