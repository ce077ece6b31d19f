"""The thinking alone: a session that leaves what follows it to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygen.events import (
    DecodeChunk,
    DecodeFinished,
    Delegated,
    DeltaKind,
    Finished,
    Piece,
    Role,
)
from relaygen.policy import Policy
from relaygen.session import Limits, RelaySession
from relaygen.state import State
from relaygen.thinking import Phase
from relaygen.usage import Usage
from tests.relaygen.support import (
    END_OF_TURN,
    Pair,
    Run,
    chunkings,
    drive,
    joined_deltas,
    limits,
    make_policy,
    pairs,
    play,
    policies,
    session_options,
    tokens,
)

POLICY = make_policy("Now")
CLOSE = "</think>"


def delegating(limits: Limits | None = None, **options: Any) -> RelaySession:
    given = {"phase": Phase.THINKING, "delegate": True, **options}
    return RelaySession(POLICY, limits or Limits(), **given)


def delegated(run: Run) -> Delegated:
    end = run.outputs[-1]
    assert isinstance(end, Delegated)
    return end


# ---- where it ends ------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [["hm", CLOSE], ["hm", "</", "think", ">"], ["hm</think>"]])
def test_it_ends_with_the_thinking(written: list[str]) -> None:
    run = play(delegating(), written)
    assert delegated(run).text == "hm</think>"
    assert (run.session.state, run.session.decoding) == (State.DONE, False)
    assert run.session.next_decode() is None


def test_it_ends_there_whoever_closes_it() -> None:
    run = play(delegating(), ["Now"], [" so", CLOSE])
    assert delegated(run) == Delegated("Now so</think>", Usage(1, 2, 0, 1))


def test_it_ends_there_too_where_the_answers_model_writes() -> None:
    session = RelaySession(make_policy("Now", answer="large"), phase=Phase.THINKING, delegate=True)
    assert delegated(play(session, ["hm", CLOSE])).usage == Usage(large_tokens=2)


def test_nothing_of_the_answer_is_kept() -> None:
    session = delegating()
    session.next_decode()
    outputs = session.receive(tokens("hm", "</think>\n\nIt", " is"))
    assert session.text == "hm</think>"
    assert [(o.kind, o.text) for o in outputs[:-1]] == [  # type: ignore[union-attr]
        (DeltaKind.REASONING, "hm"),
        (DeltaKind.TAG, CLOSE),
    ]
    assert session.usage == Usage(large_tokens=2, discarded_tokens=1)


def test_the_opening_tag_and_the_closing_one_may_come_in_one_token() -> None:
    run = play(delegating(phase=Phase.UNDECIDED), ["<think>hm</think>It"])
    assert delegated(run).text == run.text == "<think>hm</think>"


def test_a_thought_that_is_never_closed_is_closed_for_it() -> None:
    run = play(delegating(), ["hm"])
    assert delegated(run) == Delegated("hm\n</think>", Usage(large_tokens=1))
    assert run.text == "hm\n</think>"


def test_a_thought_that_spends_the_budget_ends_the_generation() -> None:
    run = play(delegating(Limits(max_tokens=2)), ["hm", CLOSE])
    assert run.end == Finished("length", Usage(large_tokens=2))


def test_a_stop_string_in_the_thinking_ends_it_where_the_policy_says_so() -> None:
    session = RelaySession(
        make_policy("Now", stops="all"),
        Limits(stops=("END",)),
        phase=Phase.THINKING,
        delegate=True,
    )
    run = play(session, ["hm", "END", CLOSE])
    assert (run.end.stop, run.text) == ("END", "hm")


# ---- without thinking ---------------------------------------------------------------------------


def test_a_model_that_does_not_think_is_not_heard() -> None:
    run = play(delegating(phase=Phase.UNDECIDED), ["\n", "It", " is"])
    assert delegated(run) == Delegated("", Usage(discarded_tokens=2))
    assert run.deltas == []


def test_what_is_withdrawn_leaves_the_budget_whole() -> None:
    session = delegating(Limits(max_tokens=1, min_tokens=1, seed=4), phase=Phase.UNDECIDED)
    play(session, ["It"])
    assert session.left == Limits(max_tokens=1, min_tokens=1, seed=4)


def test_a_prompt_past_its_thinking_is_not_heard_either() -> None:
    session = RelaySession(make_policy("Now", plain="relay"), phase=Phase.ANSWER, delegate=True)
    assert delegated(play(session, ["It"])) == Delegated("", Usage(discarded_tokens=1))


# ---- what is left -------------------------------------------------------------------------------


def test_limits_are_those_of_what_is_still_to_be_written() -> None:
    asked = Limits(max_tokens=10, min_tokens=3, seed=7, stops=("END",), include_stop=True)
    session = delegating(asked)
    assert session.left == asked
    play(session, ["Now"], [" so", CLOSE])
    assert session.left == Limits(7, 0, 8, ("END",), include_stop=True)


def test_what_was_not_asked_is_not_left() -> None:
    session = delegating()
    play(session, ["hm"])
    assert session.left == Limits()


# ---- counts that an engine does not tell at once ------------------------------------------------


def estimated(*texts: str, tokens: int = 2) -> DecodeChunk:
    return DecodeChunk(tuple(Piece(text, (), tokens) for text in texts), estimated=True)


@pytest.mark.parametrize(("told", "counted"), [(3, 3), (9, 9), (5, 5)])
def test_an_estimate_is_corrected_by_the_engines_own_count(told: int, counted: int) -> None:
    session = RelaySession(POLICY, phase=Phase.ANSWER)
    session.next_decode()
    session.receive(estimated("It", " is"))
    [end] = session.receive(DecodeFinished("stop", told))
    assert end == Finished("stop", Usage(large_tokens=counted))


def test_an_estimate_that_nobody_corrects_is_told_as_one() -> None:
    session = RelaySession(POLICY, phase=Phase.ANSWER)
    session.next_decode()
    session.receive(estimated("It", " is"))
    [end] = session.receive(END_OF_TURN)
    assert end == Finished("stop", Usage(large_tokens=4, estimated=True))


def test_a_decode_that_is_cut_off_was_only_estimated() -> None:
    session = RelaySession(POLICY, phase=Phase.THINKING)
    session.next_decode()
    session.receive(estimated("hm", " Now"))
    assert session.usage == Usage(large_tokens=4, handoffs=1, estimated=True)


def test_a_small_segments_estimate_is_corrected_for_the_small_model() -> None:
    session = RelaySession(POLICY, phase=Phase.THINKING, handoff="text")
    play(session, ["Now"])
    session.next_decode()
    session.receive(estimated(" so"))
    session.receive(DecodeFinished("stop", 1))
    assert session.usage == Usage(large_tokens=1, small_tokens=1, handoffs=2)


# ---- whatever the pair, the policy and the cut --------------------------------------------------

generations = st.tuples(policies(), pairs(), limits(), session_options())
Generation = tuple[Policy, Pair, Limits, dict[str, Any]]


def played(generation: Generation, chunks: Sequence[int] = (1,), **changes: Any) -> Run:
    policy, pair, asked, options = generation
    return drive(RelaySession(policy, asked, **{**options, "solo": None, **changes}), pair, chunks)


def thought(run: Run) -> list[tuple[Role, int, str, str]]:
    """The deltas up to the end of the thinking."""
    return [delta for delta in joined_deltas(run.deltas) if delta[2] != DeltaKind.ANSWER]


@given(generations, chunkings)
def test_only_the_thought_is_told_and_it_is_the_thought(
    generation: Generation, chunks: list[int]
) -> None:
    run = played(generation, chunks, delegate=True)
    if not isinstance(end := run.outputs[-1], Delegated):
        return
    assert not [delta for delta in run.deltas if delta.kind is DeltaKind.ANSWER]
    assert run.text == end.text
    assert end.text == "" or end.text.endswith(CLOSE)
    assert end.text.count(CLOSE) == bool(end.text)
    assert end.usage == run.session.usage


@given(generations, chunkings)
def test_it_does_not_depend_on_how_the_stream_was_cut(
    generation: Generation, chunks: list[int]
) -> None:
    one, other = played(generation, delegate=True), played(generation, chunks, delegate=True)
    assert joined_deltas(other.deltas) == joined_deltas(one.deltas)
    assert other.requests == one.requests
    ours, theirs = other.session.usage, one.session.usage
    assert (ours.large_tokens, ours.small_tokens) == (theirs.large_tokens, theirs.small_tokens)
    assert other.session.left == one.session.left


@given(generations, chunkings)
def test_the_thought_is_the_one_that_a_whole_relay_would_have(
    generation: Generation, chunks: list[int]
) -> None:
    run, free = played(generation, chunks, delegate=True), played(generation)
    if isinstance(end := run.outputs[-1], Delegated) and end.text:
        assert thought(run) == thought(free)


@given(generations, chunkings)
def test_every_token_is_kept_or_discarded(generation: Generation, chunks: list[int]) -> None:
    run = played(generation, chunks, delegate=True)
    usage = run.session.usage
    assert run.fed == usage.completion_tokens + usage.discarded_tokens
    asked = generation[2].max_tokens
    if asked is not None and isinstance(run.outputs[-1], Delegated):
        assert run.session.left.max_tokens == asked - usage.completion_tokens > 0


@given(pairs(), chunkings, st.integers(1, 4))
def test_wrong_estimates_leave_the_text_alone_and_the_last_count_is_the_engines(
    pair: Pair, chunks: list[int], guess: int
) -> None:
    """A plain generation by one model: its count is all there is."""
    told = Pair(pair.large, pair.small, with_ids=False, tells_tokens=True)
    sure = drive(RelaySession(POLICY, solo=Role.LARGE, handoff="text"), told, chunks)
    session = RelaySession(POLICY, solo=Role.LARGE, handoff="text")
    request = session.next_decode()
    assert request is not None
    pieces, finished = told.decode(request)
    text = ""
    for piece in pieces:
        outputs = session.receive(
            DecodeChunk((Piece(piece.text, (), guess * bool(piece.text)),), estimated=True)
        )
        text += "".join(output.text for output in outputs)  # type: ignore[union-attr]
    outputs = session.receive(finished)
    text += "".join(output.text for output in outputs[:-1])  # type: ignore[union-attr]
    assert text == sure.text
    assert session.usage == sure.session.usage
