"""What holds for every pair of models, policy, limit and cut of the stream."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from relaygen.errors import LocalMisuseError
from relaygen.events import (
    DecodeChunk,
    DecodeFailed,
    DecodeFinished,
    Delta,
    DeltaKind,
    Failed,
    Finished,
    Piece,
    Role,
)
from relaygen.policy import Policy
from relaygen.session import Limits, RelaySession
from relaygen.state import TRANSITIONS, State
from relaygen.thinking import Phase
from tests.relaygen.support import (
    OPEN,
    Pair,
    Run,
    ScriptedModel,
    chunkings,
    drive,
    joined_deltas,
    limits,
    make_policy,
    models,
    pairs,
    policies,
    session_options,
    text_of,
    told,
)

generations = st.tuples(policies(), pairs(), limits(), session_options())
Generation = tuple[Policy, Pair, Limits, dict[str, Any]]


def play(generation: Generation, chunks: list[int] | None = None) -> Run:
    policy, pair, asked, options = generation
    return drive(RelaySession(policy, asked, **options), pair, chunks or [1])


@given(generations, chunkings)
def test_outputs_do_not_depend_on_how_the_stream_was_cut(
    generation: Generation, chunks: list[int]
) -> None:
    one, other = play(generation), play(generation, chunks)
    assert joined_deltas(other.deltas) == joined_deltas(one.deltas)
    assert other.handoffs == one.handoffs
    assert other.requests == one.requests
    assert (other.end.reason, other.end.stop) == (one.end.reason, one.end.stop)
    ours, theirs = other.end.usage, one.end.usage
    assert (ours.large_tokens, ours.small_tokens) == (theirs.large_tokens, theirs.small_tokens)


@given(generations, chunkings)
def test_the_deltas_are_the_kept_text(generation: Generation, chunks: list[int]) -> None:
    run = play(generation, chunks)
    assert run.text == run.session.text


@given(generations, chunkings)
def test_each_delta_names_the_segment_that_wrote_it(
    generation: Generation, chunks: list[int]
) -> None:
    run = play(generation, chunks)
    ends = [*run.starts[1:], len(run.session.text)]
    by_decodes: dict[tuple[str, int], str] = {}
    for request, start, end in zip(run.requests, run.starts, ends, strict=True):
        key = (request.role, request.segment)
        by_decodes[key] = by_decodes.get(key, "") + run.session.text[start:end]
    by_deltas: dict[tuple[str, int], str] = {}
    for delta in run.deltas:
        key = (delta.role, delta.segment)
        by_deltas[key] = by_deltas.get(key, "") + delta.text
    assert by_deltas == {key: text for key, text in by_decodes.items() if text}


@given(generations)
def test_segments_and_roles_follow_the_handoffs(generation: Generation) -> None:
    run = play(generation)
    order = dict.fromkeys((request.role, request.segment) for request in run.requests)
    expected = [(run.requests[0].role, 0)]
    expected += [(handoff.target, handoff.segment) for handoff in run.handoffs]
    assert list(order) == expected
    assert [segment for _, segment in expected] == list(range(len(expected)))
    assert run.end.usage.segments == len(expected)


@given(generations)
def test_kinds_never_go_back(generation: Generation) -> None:
    kinds = [kind for _, _, kind, _ in joined_deltas(play(generation).deltas)]
    order = [k for i, k in enumerate(kinds) if not i or k != kinds[i - 1]]
    tag, reasoning = DeltaKind.TAG, DeltaKind.REASONING
    whole = [tag, reasoning, tag, DeltaKind.ANSWER]
    rest = iter(whole)
    assert all(kind in rest for kind in order)


@given(generations)
def test_one_decode_at_a_time(generation: Generation) -> None:
    policy, pair, asked, options = generation
    session = RelaySession(policy, asked, **options)
    while (request := session.next_decode()) is not None:
        with pytest.raises(LocalMisuseError):
            session.next_decode()
        pieces, finished = pair.decode(request)
        session.receive(DecodeChunk(tuple(pieces)))
        if session.decoding:
            session.receive(finished)
        with pytest.raises(LocalMisuseError):
            session.receive(finished)


@given(generations, chunkings)
def test_the_ledger_accounts_for_every_token(generation: Generation, chunks: list[int]) -> None:
    run = play(generation, chunks)
    usage = run.session.usage
    assert run.fed == usage.completion_tokens + usage.discarded_tokens
    assert run.end.usage == usage
    assert usage.handoffs == len(run.handoffs)


@given(generations)
def test_the_budget_and_seed_hold_for_the_whole_generation(generation: Generation) -> None:
    run, asked = play(generation), generation[2]
    for request, kept in zip(run.requests, run.kept, strict=True):
        if asked.max_tokens is not None:
            assert request.max_tokens == asked.max_tokens - kept > 0
        if asked.min_tokens is not None:
            assert request.min_tokens == max(0, asked.min_tokens - kept)
        if asked.seed is not None:
            assert request.seed == asked.seed + request.segment
    if asked.max_tokens is not None:
        assert run.end.usage.completion_tokens <= asked.max_tokens


@given(policies() | policies(match="substring"), pairs(with_ids=True), limits(), session_options())
def test_a_prefix_of_ids_decodes_to_the_text(
    policy: Policy, pair: Pair, asked: Limits, options: dict[str, Any]
) -> None:
    run = drive(RelaySession(policy, asked, **options | {"handoff": "tokens"}), pair)
    for request, start in zip(run.requests, run.starts, strict=True):
        if not isinstance(request.prefix, str):
            assert text_of(request.prefix) == run.session.text[:start]


@given(policies(match="word"), pairs(with_ids=True), limits(), session_options())
def test_ids_known_and_cut_between_tokens_stay_ids(
    policy: Policy, pair: Pair, asked: Limits, options: dict[str, Any]
) -> None:
    options |= {"handoff": "tokens", "close_ids": (3, 1)}
    run = drive(RelaySession(policy, asked, **options), pair)
    assert all(isinstance(request.prefix, tuple) for request in run.requests)


@given(generations)
def test_a_text_handoff_sends_what_the_client_read_and_no_last_blank(
    generation: Generation,
) -> None:
    policy, pair, asked, options = generation
    session = RelaySession(policy, asked, **{**options, "handoff": "text"})
    read = ""
    while (request := session.next_decode()) is not None:
        prefix = request.prefix
        assert isinstance(prefix, str)
        assert prefix == prefix.rstrip()
        assert prefix.startswith(read)  # a held-back beginning of a tag may be still to come
        assert prefix[len(read) :] in ("", *("</think>"[:i] for i in range(8)))
        pieces, finished = pair.decode(request)
        outputs = session.receive(DecodeChunk(tuple(pieces)))
        if session.decoding:
            outputs += session.receive(finished)
        read += "".join(output.text for output in outputs if isinstance(output, Delta))


@given(
    models(),
    models(),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    session_options(),
    chunkings,
)
def test_without_cues_and_with_the_large_answer_it_is_the_large_models_own_text(
    large: ScriptedModel,
    small: ScriptedModel,
    grouping: list[int],
    options: dict[str, Any],
    chunks: list[int],
) -> None:
    own = list(large.ids(b""))
    text = "".join(piece.text for piece in told(own))
    thinks = options["phase"] is Phase.THINKING or text.lstrip().startswith("<think>")
    assume(not thinks or "</think>" in text)
    options |= {"solo": None}
    pair = Pair(large, small, grouping=tuple(grouping))
    run = drive(RelaySession(make_policy(answer="large"), **options), pair, chunks)
    assert run.text == run.session.text == text
    assert run.end.usage.small_tokens == 0
    assert run.end.usage.large_tokens == len(own) + 1


@given(generations, st.lists(st.sampled_from(["END", "x", ". ", "\n\n", "é"]), max_size=2))
def test_a_stop_string_cuts_what_would_have_been_written(
    generation: Generation, stops: list[str]
) -> None:
    policy, pair, asked, options = generation
    free = play(generation)
    stopped = drive(
        RelaySession(policy, Limits(asked.max_tokens, stops=tuple(stops)), **options), pair
    )
    watched = [text for kind, text in kinds_of(free) if kind in scope(policy)]
    cuts = [(i, cut) for i, text in enumerate(watched) if (cut := first_stop(text, stops))]
    if not cuts:
        assert joined_deltas(stopped.deltas) == joined_deltas(free.deltas)
        assert stopped.end.stop is None
        return
    index, (at, stop) = cuts[0]
    seen = [text for kind, text in kinds_of(stopped) if kind in scope(policy)]
    assert [*watched[:index], watched[index][:at]] == [*seen, ""][: index + 1]
    assert free.text.startswith(stopped.text)
    assert (stopped.end.stop, stopped.end.reason) == (stop, "stop")


def scope(policy: Policy) -> set[DeltaKind]:
    everywhere = {DeltaKind.REASONING, DeltaKind.ANSWER}
    return everywhere if policy.stops == "all" else {DeltaKind.ANSWER}


def kinds_of(run: Run) -> list[tuple[DeltaKind, str]]:
    """The text of each kind, whoever wrote it."""
    texts: dict[DeltaKind, str] = {}
    for delta in run.deltas:
        texts[delta.kind] = texts.get(delta.kind, "") + delta.text
    return list(texts.items())


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the stop string begins that ends first in `text`, the longest of those."""
    found = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not found:
        return None
    end, _, stop = min(found)
    return end - len(stop), stop


# ---- whatever an engine sends -------------------------------------------------------------------

texts = st.sampled_from(
    ["", "", "Now", " so", ".", "3", "\n\n", " ", "<think>", "</think>", "</", "think>", "END", "é"]
)
pieces = st.builds(
    Piece,
    texts,
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.integers(0, 3),
    st.none() | st.floats(max_value=0),
)
events = st.one_of(
    st.builds(DecodeChunk, st.lists(pieces, max_size=3).map(tuple)),
    st.builds(DecodeChunk, st.tuples(pieces)),
    st.builds(DecodeChunk, st.tuples(pieces)),
    st.builds(
        DecodeFinished,
        st.sampled_from(["stop", "stop", "length", "content_filter", ""]),
        st.none() | st.integers(0, 9),
    ),
    st.builds(DecodeFailed, st.just("connection reset")),
)
sent = st.lists(events, min_size=1, max_size=25)
asked_stops = st.lists(st.sampled_from(["END", "\n\n", "x</", ". "]), max_size=2).map(tuple)


@given(policies(), asked_stops, st.booleans(), session_options(), sent)
def test_nothing_an_engine_sends_raises(
    policy: Policy,
    stops: tuple[str, ...],
    include: bool,
    options: dict[str, Any],
    sent: list[DecodeChunk | DecodeFinished | DecodeFailed],
) -> None:
    session = RelaySession(policy, Limits(40, stops=stops, include_stop=include), **options)
    run = Run(session)
    for event in sent:
        if not session.decoding and session.next_decode() is None:
            break
        run.outputs += session.receive(event)
    ends = [output for output in run.outputs if isinstance(output, Finished | Failed)]
    assert len(ends) == session.state.ended
    assert all(isinstance(delta, Delta) and delta.text for delta in run.deltas)
    read = run.text
    if session.state in (State.DONE, State.FAILED) and not stops:
        assert read == session.text
    assert session.text.startswith(read)


@given(policies(), asked_stops, session_options(), st.lists(pieces, max_size=25), st.booleans())
def test_tokens_are_accounted_for_when_the_decode_breaks(
    policy: Policy, stops: tuple[str, ...], options: dict[str, Any], sent: list[Piece], leave: bool
) -> None:
    session = RelaySession(policy, Limits(stops=stops), **options)
    fed = 0
    for piece in sent:
        if not session.decoding and session.next_decode() is None:
            break
        session.receive(DecodeChunk((piece,)))
        fed += piece.tokens
    if leave:
        session.cancel()
    elif session.decoding or session.next_decode() is not None:
        session.receive(DecodeFailed("connection reset"))
    assert fed == session.usage.completion_tokens + session.usage.discarded_tokens


WRITERS = {State.LARGE: Role.LARGE, State.SMALL: Role.SMALL}
EDGES = {(source, target) for (source, _), target in TRANSITIONS.items()}


@given(generations, st.booleans())
def test_every_state_is_reached_by_a_row_of_the_table(generation: Generation, leaves: bool) -> None:
    policy, pair, asked, options = generation
    session = RelaySession(policy, asked, **options)
    states = [session.state]
    while (request := session.next_decode()) is not None:
        states.append(session.state)
        pieces, finished = pair.decode(request)
        for event in [*(DecodeChunk((piece,)) for piece in pieces), finished]:
            if session.decoding:
                session.receive(event)
                states.append(session.state)
                assert WRITERS.get(session.state, session.role) is session.role
        if leaves and len(states) > 20:
            session.cancel()
            states.append(session.state)
    steps = {(a, b) for a, b in pairwise(states) if a is not b}
    assert steps <= EDGES
    assert states[-1].ended


def test_the_scripted_pair_does_relay() -> None:
    """The strategies above would prove nothing if their models never handed over."""
    large = ScriptedModel((OPEN + 3, 5, 28, 27, 14), closes_at=60)
    small = ScriptedModel((28, 14, 16, 38), closes_at=80)
    session = RelaySession(make_policy("Now"), phase=Phase.THINKING)
    run = drive(session, Pair(large, small))
    assert len(run.handoffs) > 3
