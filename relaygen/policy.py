"""The policy: one YAML for one pair of models. Text in, typed policy or named problems out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from math import isfinite
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from relaygen.boundaries import BoundaryMatch, BoundarySet
from relaygen.cues import CueMatch, CueSet
from relaygen.errors import PolicyError, Problem
from relaygen.events import Role
from relaygen.policy_yaml import parse

Text: TypeAlias = Annotated[str, StringConstraints(strict=True, min_length=1)]
MAX_TOKENS = 2**31 - 1
"""More than any engine takes."""
Count: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=MAX_TOKENS)]
Sampling: TypeAlias = dict[str, Any]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSpec(_Section):
    """One role's model."""

    backend: Text = Field(description="Key under `backends` in gateway.yaml.")
    model: Text = Field(description="Model name that the engine serves.")
    tokenizer: Text = Field(
        default="auto",
        description="Who renders prompts: `auto` (the engine), a Hugging Face id or a folder.",
    )
    sampling: Sampling = Field(
        default_factory=dict,
        description="Request fields for this role where the client's request is silent.",
    )


class Thinking(_Section):
    """How the models mark their reasoning, and where clients get it."""

    open: Text = "<think>"
    close: Text = "</think>"
    field: Literal["reasoning_content", "reasoning", "both", "inline"] = Field(
        default="reasoning_content",
        description="Reply field of the reasoning; `inline` leaves it in `content` with its tags.",
    )


class Cues(_Section):
    """What ends a large segment."""

    match: CueMatch = Field(default=CueMatch.WORD, description="`word` or `substring`.")
    words: tuple[Text, ...] = Field(description="The cues, matched as they are written.")


class Boundary(_Section):
    """What ends a small segment."""

    match: BoundaryMatch = Field(
        default=BoundaryMatch.SENTENCE, description="`sentence` or `substring`."
    )
    ends: tuple[Text, ...] = Field(
        default=(".", "!", "?", "\n\n"), min_length=1, description="What a sentence ends with."
    )


class OnFailure(_Section):
    """Who goes on when no engine of a role can, and what was written so far is kept."""

    large: Literal["small", "fail"] = Field(
        default="fail", description="`small`: the small model goes on; `fail`: the generation ends."
    )
    small: Literal["large", "fail"] = Field(
        default="large",
        description="`large`: the large model goes on; `fail`: the generation ends.",
    )


class Pace(_Section):
    """What one role's engine must keep up, where another can take over. None: not asked."""

    first_token: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Seconds to the first token of a segment, at most."
    )
    tokens_per_second: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Tokens a second within a segment, at least."
    )


class Slow(_Section):
    """When an engine is too slow to be used."""

    large: Pace = Field(default_factory=Pace)
    small: Pace = Field(default_factory=Pace)
    hold: bool = Field(
        default=True,
        description="Leave the small model out while it is measured to be slower than the large.",
    )

    def of(self, role: Role) -> Pace:
        return self.large if role is Role.LARGE else self.small


class Policy(_Section):
    """How one pair of models shares a generation. `name` is the model that clients ask for."""

    version: Literal[1] = Field(description="Schema version.")
    name: Text
    large: ModelSpec
    small: ModelSpec
    sampling: Sampling = Field(
        default_factory=dict, description="Request fields where the client's request is silent."
    )
    thinking: Thinking = Field(default_factory=Thinking)
    cues: Cues
    boundary: Boundary = Field(default_factory=Boundary)
    answer: Role = Field(default=Role.SMALL, description="Who writes what follows the thinking.")
    tools: Literal["large", "small", "whole"] = Field(
        default="large",
        description="Who writes what follows the thinking of a request with tools or structured "
        "output; `whole`: the large model, thinking and all.",
    )
    plain: Literal["large", "relay"] = Field(
        default="large", description="Generations without thinking: `large` alone, or `relay`."
    )
    min_large_tokens: Count = Field(
        default=5, description="Tokens a large segment keeps before a cue can end it."
    )
    max_small_tokens: Annotated[int, Field(strict=True, ge=1, le=MAX_TOKENS)] = Field(
        default=256, description="Tokens after which a small segment ends without a sentence end."
    )
    handoff: Literal["auto", "tokens", "text"] = Field(
        default="auto",
        description="What the next engine is sent: token ids, text, or best of both.",
    )
    stops: Literal["answer", "all"] = Field(
        default="answer", description="Where the client's stop strings apply."
    )
    on_failure: OnFailure = Field(
        default_factory=OnFailure, description="Who goes on when a role's engines fail."
    )
    slow: Slow = Field(default_factory=Slow, description="When an engine is too slow to be used.")
    overlap: bool = Field(
        default=False,
        description="Begin the large model's segment while one token more decides whether it "
        "comes.",
    )
    warm_every_tokens: Count = Field(
        default=0,
        description="Tokens after which the model that waits reads what the other one writes, by a "
        "request for one token; `0`: at handoffs only.",
    )
    calibration: dict[str, Any] = Field(
        default_factory=dict, description="Provenance and per-cue statistics."
    )

    def spec(self, role: Role) -> ModelSpec:
        return self.large if role is Role.LARGE else self.small

    @property
    def works_ahead(self) -> bool:
        """Whether engines are asked for what may not be needed."""
        return self.overlap or self.warm_every_tokens > 0

    @property
    def expected_large_share(self) -> float | None:
        """Share of the tokens that calibration expects of the large model, 0..1, if it says so."""
        expected = self.calibration.get("expected")
        small = expected.get("small_share") if isinstance(expected, dict) else None
        return 1 - small if isinstance(small, float) and 0 <= small <= 1 else None

    def stands_in(self, role: Role) -> bool:
        """Whether the other role goes on where this one's engines fail."""
        said = self.on_failure.large if role is Role.LARGE else self.on_failure.small
        return said != "fail"

    @cached_property
    def cue_set(self) -> CueSet:
        return CueSet(self.cues.words, self.cues.match)

    @cached_property
    def boundary_set(self) -> BoundarySet:
        return BoundarySet(self.boundary.ends, self.boundary.match)


def load_policy(text: str, source: str) -> Policy:
    """The policy in a YAML `text`. PolicyError names every problem with `source` and field."""
    data = parse(text, source)
    if not isinstance(data, dict):
        kind = "nothing" if data is None else type(data).__name__
        message = f"expected a mapping of keys, got {kind}"
        raise PolicyError([Problem(source, "(file)", message, "write `key: value` lines")])
    try:
        policy = Policy.model_validate(data)
    except ValidationError as error:
        raise PolicyError([_problem(source, e) for e in error.errors()]) from None
    if problems := [
        *_cue_problems(policy, source),
        *_handoff_problems(policy, source),
        *_sampling_problems(policy, source),
    ]:
        raise PolicyError(problems)
    return policy


def policy_warnings(policy: Policy, source: str) -> list[Problem]:
    """What is allowed but surely not meant: cues that add nothing to another."""
    cues, words = policy.cue_set, policy.cues.words
    warnings = []
    for i, word in enumerate(words):
        for j, other in enumerate(words):
            if i != j and cues.hides(other, word) and (other != word or j < i):
                message = (
                    f"cue {word!r} is hidden by cue {other!r} (cues.words[{j}]), "
                    "which is complete no later"
                )
                warnings.append(Problem(source, f"cues.words[{i}]", message, "remove one of them"))
                break
    return warnings


# ---- what is wrong, in the user's words ---------------------------------------------------------


def _problem(source: str, error: ErrorDetails) -> Problem:
    field = _field(error["loc"])
    value = error["input"]
    message = error["msg"][:1].lower() + error["msg"][1:]
    match error["type"]:
        case "missing":
            return Problem(source, field, "required, but missing", "add it")
        case "extra_forbidden":
            known = ", ".join(_known_keys(error["loc"][:-1]))
            return Problem(source, field, "unknown key", f"known here: {known}")
        case "string_too_short":
            return Problem(source, field, "must not be empty", "remove it or give it a text")
        case "string_type" if isinstance(value, bool):
            return Problem(
                source,
                field,
                f"expected a text, got {value}",
                "YAML reads an unquoted Yes, No, On, Off as true or false: put it in quotes",
            )
        case _:
            return Problem(source, field, f"{message}, got {_shown(value)}", "change it")


def _field(loc: tuple[int | str, ...]) -> str:
    field = ""
    for part in loc:
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else part
    return field


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _known_keys(loc: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Policy
    for part in loc:
        annotation = model.model_fields[str(part)].annotation
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        model = annotation
    return list(model.model_fields)


def _cue_problems(policy: Policy, source: str) -> Iterator[Problem]:
    for i, word in enumerate(policy.cues.words):
        field = f"cues.words[{i}]"
        if not word.strip():
            yield Problem(source, field, "a cue must not be empty or blank", "remove it")
        elif word != word.strip() and policy.cues.match is CueMatch.WORD:
            remedy = f"write {word.strip()!r}, or set cues.match to substring"
            message = f"{word!r} begins or ends with a blank, which whole words never do"
            yield Problem(source, field, message, remedy)


def _handoff_problems(policy: Policy, source: str) -> Iterator[Problem]:
    inside_tokens = policy.cues.match is CueMatch.SUBSTRING or (
        policy.boundary.match is BoundaryMatch.SUBSTRING
    )
    if policy.handoff == "tokens" and inside_tokens:
        message = "`tokens` can't follow `match: substring`, which cuts inside tokens"
        yield Problem(source, "handoff", message, "set handoff to auto or text")


def _sampling_problems(policy: Policy, source: str) -> Iterator[Problem]:
    """What no request to an engine can hold."""
    fields = {
        "sampling": policy.sampling,
        "large.sampling": policy.large.sampling,
        "small.sampling": policy.small.sampling,
    }
    for field, sampling in fields.items():
        for key, value in sampling.items():
            if not _is_json(value):
                message = f"expected what JSON can hold, got {_shown(value)}"
                yield Problem(
                    source, f"{field}.{key}", message, "write a number or a text in quotes"
                )


def _is_json(value: object) -> bool:
    match value:
        case None | bool() | str():
            return True
        case int():
            return -(2**63) <= value < 2**64
        case float():
            return isfinite(value)
        case list():
            return all(map(_is_json, value))
        case dict():
            return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
        case _:
            return False
