"""What a session tells of decodes that it may ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygen.events import DecodeChunk, DecodeRequest, Role
from relaygen.policy import Policy
from relaygen.session import Limits, RelaySession
from relaygen.state import State
from tests.relaygen.support import (
    VOCABULARY,
    Pair,
    ScriptedModel,
    drive,
    limits,
    make_policy,
    pairs,
    policies,
    session_options,
    thinking_session,
    tokens,
)

POLICY = make_policy("Now", answer="small")


def small_writes(*texts: str, **options: Any) -> RelaySession:
    """A session in whose second segment these came."""
    session = thinking_session(POLICY, **options)
    session.next_decode()
    session.receive(tokens("Now"))
    session.next_decode()
    for text in texts:
        session.receive(tokens(text))
    return session


# ---- the large model's next segment -------------------------------------------------------------


def test_a_dot_after_a_digit_may_end_the_segment() -> None:
    session = small_writes(" 3", ".")
    asked = DecodeRequest(Role.LARGE, 2, (1, 1, 1))
    assert session.foreseen() == asked
    session.receive(tokens(" So"))
    assert not session.decoding
    assert session.next_decode() == asked


def test_what_shows_that_it_does_not_ends_the_foresight() -> None:
    session = small_writes(" 3", ".")
    session.receive(tokens("14"))
    assert session.decoding
    assert session.foreseen() is None


@pytest.mark.parametrize("texts", [(), (" it",), (" 3",), ("\n", "1", ".")])
def test_nothing_is_foreseen_elsewhere(texts: tuple[str, ...]) -> None:
    assert small_writes(*texts).foreseen() is None


def test_nothing_is_foreseen_while_the_large_model_writes() -> None:
    session = thinking_session(POLICY)
    assert session.foreseen() is None
    session.next_decode()
    session.receive(tokens("3"))
    session.receive(tokens("."))
    assert session.foreseen() is None


def test_nothing_is_foreseen_where_nobody_may_take_over() -> None:
    session = small_writes(" 3", ".")
    session.holds = lambda: frozenset({Role.LARGE})
    assert session.foreseen() is None


def test_a_blank_that_waits_is_not_in_a_text_prefix() -> None:
    session = small_writes(" 3", ".", handoff="text")
    foreseen = session.foreseen()
    assert foreseen is not None
    assert foreseen.prefix == "Now 3."


# ---- warm-ups -----------------------------------------------------------------------------------


def test_a_warm_up_has_the_other_model_read_all_so_far() -> None:
    session = thinking_session(POLICY, Limits(max_tokens=9, min_tokens=7, seed=5))
    session.next_decode()
    session.receive(tokens("Six", " plus"))
    assert session.warm_up() == DecodeRequest(Role.SMALL, 0, (1, 2), 1, None, 5)


def test_the_large_model_is_warmed_up_too() -> None:
    warm_up = small_writes(" it").warm_up()
    assert warm_up is not None
    assert warm_up.role is Role.LARGE


def test_a_model_that_does_not_take_over_is_not_warmed_up() -> None:
    assert thinking_session(POLICY).warm_up() is None
    answering = small_writes("</think>", "Six")
    assert answering.state is State.ANSWER
    assert answering.warm_up() is None
    held = small_writes(" it")
    held.holds = lambda: frozenset({Role.LARGE})
    assert held.warm_up() is None


# ---- for all pairs ------------------------------------------------------------------------------


class Looking(RelaySession):
    """Is asked what it foresees after every read."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[DecodeRequest | None] = []
        self.warmed: list[DecodeRequest] = []

    def receive(self, event: Any) -> Any:
        before, foreseen = self.text, self.foreseen()
        outputs = super().receive(event)
        if foreseen and isinstance(event, DecodeChunk) and not self.decoding:
            same = self.text == before and not self.state.ended
            self.seen.append(foreseen if same else None)
        else:
            self.seen.append(None)
        if (warm_up := self.warm_up()) is not None:
            self.warmed.append(warm_up)
        return outputs

    def next_decode(self) -> DecodeRequest | None:
        request = super().next_decode()
        if self.seen and self.seen[-1] is not None:
            assert self.seen[-1] == request
        return request


COUNTING = [VOCABULARY.index(t) for t in (b" 3", b"14", b"1", b".", b".", b".", b" x", b" ")]
counting = st.permutations(COUNTING).map(lambda ids: ScriptedModel(tuple(ids)))


@given(policies(), pairs(), counting, limits(), session_options())
def test_looking_ahead_changes_nothing_and_is_right(
    policy: Policy, pair: Pair, small: ScriptedModel, asked: Limits, options: dict[str, Any]
) -> None:
    pair, policy = replace(pair, small=small), policy.model_copy(update={"max_small_tokens": 8})
    plain = drive(RelaySession(policy, asked, **options), pair)
    looking = drive(session := Looking(policy, asked, **options), pair)
    assert looking.outputs == plain.outputs
    assert looking.requests == plain.requests
    assert all(request.max_tokens == 1 for request in session.warmed)
