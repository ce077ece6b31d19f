"""A decode that breaks is gone on from what is kept: by the same role, or by the one that may."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from relaygen.errors import LocalMisuseError
from relaygen.events import (
    DecodeChunk,
    DecodeFinished,
    Delegated,
    Delta,
    Finished,
    Handoff,
    Piece,
    Role,
)
from relaygen.policy import Policy
from relaygen.session import Limits, RelaySession
from relaygen.state import State, Trigger
from relaygen.thinking import Phase
from tests.relaygen.support import (
    Pair,
    Run,
    drive,
    drive_broken,
    joined_deltas,
    limits,
    make_policy,
    models,
    policies,
    session_options,
    thinking_session,
    tokens,
)

lone_pairs = st.builds(Pair, models(), models(), st.booleans(), st.booleans())
breaks = st.lists(st.none() | st.integers(0, 12), max_size=12)
both = frozenset(Role)


@given(policies(), lone_pairs, limits(), session_options(), breaks)
def test_a_generation_that_broke_is_what_it_would_have_been(
    policy: Policy, pair: Pair, asked: Limits, options: dict[str, Any], breaks: list[int | None]
) -> None:
    whole = drive(RelaySession(policy, asked, **options), pair)
    broken = drive_broken(RelaySession(policy, asked, **options), pair, breaks)
    if any(isinstance(request.prefix, str) for request in [*whole.requests, *broken.requests]):
        # Text does not tell all: bytes that are none, and blanks that belong to a word's token.
        assume("\ufffd" not in whole.text and "ok. " not in whole.text)
    assert joined_deltas(broken.deltas) == joined_deltas(whole.deltas)
    assert broken.handoffs == whole.handoffs
    ours, theirs = broken.end, whole.end
    assert (ours.reason, ours.stop) == (theirs.reason, theirs.stop)
    assert ours.usage.large_tokens == theirs.usage.large_tokens
    assert ours.usage.small_tokens == theirs.usage.small_tokens
    assert logprobs(broken) == logprobs(whole)
    assert broken.fed == ours.usage.completion_tokens + ours.usage.discarded_tokens


def logprobs(run: Run) -> int:
    """How many tokens the client is told."""
    return sum(len(delta.pieces) for delta in run.deltas)


@given(policies(), lone_pairs, limits(), session_options(), breaks)
def test_a_resumed_decode_has_what_is_left_of_the_budget(
    policy: Policy, pair: Pair, asked: Limits, options: dict[str, Any], breaks: list[int | None]
) -> None:
    run = drive_broken(RelaySession(policy, asked, **options), pair, breaks)
    for request, kept in zip(run.requests, run.kept, strict=True):
        if asked.max_tokens is not None:
            assert request.max_tokens == asked.max_tokens - kept > 0


def writing(
    policy: Policy, *decodes: tuple[str, ...], held: frozenset[Role] = frozenset(), **options: Any
) -> RelaySession:
    """A session that has read these decodes, the last of which is still open."""
    session = thinking_session(policy, **options)
    session.holds = lambda: held
    for texts in decodes:
        assert session.next_decode() is not None
        for text in texts:
            session.receive(tokens(text))
    assert session.decoding
    return session


def test_resuming_counts_and_says_no_word() -> None:
    session = writing(make_policy("Now"), ("Six",), limits=Limits(seed=7))
    assert session.resume() == []
    assert (session.usage.resumes, session.usage.handoffs) == (1, 0)
    request = session.next_decode()
    assert request is not None
    assert (request.role, request.segment, request.prefix) == (Role.LARGE, 0, (1,))
    assert request.seed == 8  # the numbers drawn before are not drawn again


def test_only_an_open_decode_is_resumed() -> None:
    session = thinking_session(make_policy("Now"))
    with pytest.raises(LocalMisuseError):
        session.resume()


def test_a_spent_budget_is_an_end_and_no_reason_to_ask_again() -> None:
    session = writing(make_policy("Now"), ("Six",), limits=Limits(max_tokens=1))
    (end,) = session.resume()
    assert isinstance(end, Finished) and end.reason == "length"
    assert session.next_decode() is None


def test_half_a_character_is_written_again() -> None:
    session = writing(make_policy("Now"), ("Six", ""))
    session.resume()
    assert session.usage.discarded_tokens == 1
    request = session.next_decode()
    assert request is not None and request.prefix == (1,)


def test_without_ids_it_goes_on_from_text_for_good() -> None:
    session = writing(make_policy("Now"), ("Six",))
    session.resume(ids=False)
    request = session.next_decode()
    assert request is not None and request.prefix == "Six"
    session.receive(tokens(" plus"))
    session.resume()
    request = session.next_decode()
    assert request is not None and request.prefix == "Six plus"


# ---- the other role -----------------------------------------------------------------------------


def test_the_large_model_stands_in_for_the_small_one_unless_the_policy_says_no() -> None:
    session = writing(make_policy("Now"), ("Now",), (" it",))
    assert session.stand_in is Role.LARGE
    (handoff,) = session.resume(Role.LARGE)
    assert isinstance(handoff, Handoff)
    assert (handoff.target, handoff.trigger) == (Role.LARGE, Trigger.FALLBACK)
    assert session.state is State.LARGE and session.segment == 2
    strict = writing(make_policy("Now", on_failure={"small": "fail"}), ("Now",), (" it",))
    assert strict.stand_in is None


def test_the_small_model_stands_in_for_the_large_one_where_the_policy_says_so() -> None:
    assert writing(make_policy("Now"), ("Six",)).stand_in is None
    session = writing(make_policy("Now", on_failure={"large": "small"}), ("Six",))
    assert session.stand_in is Role.SMALL
    session.resume(Role.SMALL)
    assert (session.state, session.role) == (State.SMALL, Role.SMALL)


def test_nobody_stands_in_for_a_role_that_was_asked_for() -> None:
    solo = RelaySession(make_policy("Now"), solo=Role.SMALL)
    solo.next_decode()
    assert solo.stand_in is None


def test_a_role_that_is_held_is_better_than_none() -> None:
    session = writing(make_policy("Now"), ("Now",), (" it",))
    session.holds = lambda: frozenset({Role.LARGE})
    assert session.stand_in is Role.LARGE


def test_an_answer_goes_on_by_the_other_role() -> None:
    session = writing(make_policy("Now"), ("x", "</think>"), ("It",))
    session.resume(Role.LARGE)
    assert (session.state, session.role) == (State.ANSWER, Role.LARGE)
    request = session.next_decode()
    assert request is not None and request.role is Role.LARGE


def test_an_answer_resumed_at_its_end_is_not_missing() -> None:
    session = writing(make_policy("Now"), ("x", "</think>"), ("It",))
    session.resume()
    session.next_decode()
    (end,) = session.receive(DecodeFinished("stop"))
    assert isinstance(end, Finished)


# ---- roles that are held ------------------------------------------------------------------------

SMALL_HELD, LARGE_HELD = frozenset({Role.SMALL}), frozenset({Role.LARGE})


def test_no_cue_hands_over_to_a_role_that_is_held() -> None:
    session = writing(make_policy("Now"), ("Now", " it"), held=SMALL_HELD)
    assert session.role is Role.LARGE
    session.holds = lambda: frozenset()
    session.receive(tokens(" Now"))
    assert session.role is Role.SMALL and not session.decoding


def test_the_answer_stays_with_the_large_model_while_the_small_one_is_held() -> None:
    session = writing(make_policy("Now"), ("x", "</think>", "It"), held=SMALL_HELD)
    assert (session.state, session.role) == (State.ANSWER, Role.LARGE)


def test_the_small_model_writes_on_while_the_large_one_is_held() -> None:
    policy = make_policy("Now", max_small_tokens=2, on_failure={"large": "small"})
    session = writing(policy, ("Six",))
    session.resume(Role.SMALL)
    session.holds = lambda: LARGE_HELD
    session.next_decode()
    for text in (" is", " it", ".", "\n\n", "Yes"):
        session.receive(tokens(text))
    assert session.role is Role.SMALL and session.decoding
    session.receive(DecodeFinished("stop"))  # inside the thinking: closed for it
    assert (session.state, session.text[-9:]) == (State.ANSWER, "\n</think>")
    session.next_decode()
    (end,) = session.receive(DecodeFinished("stop"))
    assert isinstance(end, Finished)


def test_a_held_large_model_leaves_a_plain_relay_to_the_small_one() -> None:
    policy = make_policy("Now", plain="relay", on_failure={"large": "small"})
    session = RelaySession(policy, phase=Phase.ANSWER)
    session.next_decode()
    session.resume(Role.SMALL)
    session.holds = lambda: LARGE_HELD
    session.next_decode()
    session.receive(tokens("It"))
    (end,) = session.receive(DecodeFinished("stop"))
    assert isinstance(end, Finished)


def test_a_thought_closed_for_the_small_model_is_delegated_too() -> None:
    policy = make_policy("Now", on_failure={"large": "small"})
    session = writing(policy, ("Six",), delegate=True)
    session.resume(Role.SMALL)
    session.holds = lambda: LARGE_HELD
    session.next_decode()
    *_, end = session.receive(DecodeFinished("stop"))
    assert isinstance(end, Delegated) and end.text == "Six\n</think>"


# ---- engines that go on for ever ----------------------------------------------------------------


def test_an_engine_that_goes_on_beyond_its_budget_is_left() -> None:
    session = writing(make_policy(), ("a", "b"), limits=Limits(max_tokens=2))
    *_, end = session.receive(tokens("c"))
    assert isinstance(end, Finished) and (end.reason, session.text) == ("length", "ab")
    assert session.usage.discarded_tokens == 1


def test_tokens_without_text_are_bounded_as_well() -> None:
    session = writing(make_policy(), ("a",), limits=Limits(max_tokens=2))
    for _ in range(2):
        session.receive(tokens(""))
    assert session.decoding  # the last may be the end of turn
    *_, end = session.receive(tokens(""))
    assert isinstance(end, Finished) and end.reason == "length"


def test_guessed_counts_bound_nothing() -> None:
    session = writing(make_policy(), (), limits=Limits(max_tokens=2))
    for _ in range(4):
        session.receive(DecodeChunk((Piece("a", (), 1),), estimated=True))
    assert session.decoding


def test_a_blank_that_waited_is_written_again_and_counted_once() -> None:
    session = writing(make_policy("Now"), ("Now",), (" it", " "), handoff="text")
    read = session.resume()
    assert read == [] and session.text == "Now it"
    assert (session.usage.small_tokens, session.usage.discarded_tokens) == (1, 1)
    session.next_decode()
    out = session.receive(tokens(" is"))
    assert [o.text for o in out if isinstance(o, Delta)] == [" is"]
