"""One generation, step by step: what a driver asks and what the client reads."""

from __future__ import annotations

from typing import Any

import pytest

from relaygen.errors import LocalMisuseError
from relaygen.events import (
    DecodeChunk,
    DecodeFailed,
    DecodeFinished,
    DeltaKind,
    Failed,
    Finished,
    Handoff,
    Piece,
    Role,
)
from relaygen.session import Limits, RelaySession
from relaygen.state import State, Trigger
from relaygen.thinking import Phase
from relaygen.usage import Usage
from tests.relaygen.support import END_OF_TURN, make_policy, play, thinking_session, tokens

POLICY = make_policy("Now", "Therefore", "Other")


def thinking(**fields: Any) -> RelaySession:
    """A session inside the thinking, with the policy's `fields` changed."""
    return thinking_session(make_policy("Now", "Therefore", "Other", **fields))


def triggers(outputs: list[Any]) -> list[tuple[Trigger, str]]:
    return [(o.trigger, o.text) for o in outputs if isinstance(o, Handoff)]


# ---- cues ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written", [["Now"], [" Now"], ["Now,"], ["There", "fore"], ["\n", "Other", " ways"]]
)
def test_a_cue_hands_over_to_the_small_model(written: list[str]) -> None:
    run = play(thinking(), ["hm ", *written])
    assert [(h.source, h.target, h.segment) for h in run.handoffs] == [(Role.LARGE, Role.SMALL, 1)]
    assert run.handoffs[0].trigger is Trigger.CUE


@pytest.mark.parametrize("written", ["know", "Otherwise", "Nowhere", "now"])
def test_part_of_a_word_hands_nothing_over(written: str) -> None:
    session = thinking()
    session.next_decode()
    session.receive(tokens("hm ", written))
    assert session.decoding


def test_a_word_that_only_begins_like_a_cue_hands_nothing_over() -> None:
    session = thinking()
    session.next_decode()
    session.receive(tokens("There", "by", "."))
    assert session.decoding


def test_the_cue_is_kept_and_what_follows_it_is_discarded() -> None:
    session = thinking()
    session.next_decode()
    session.receive(tokens("hm", " Now", ",", " we"))
    assert session.text == "hm Now"
    assert session.usage == Usage(large_tokens=2, discarded_tokens=2, handoffs=1)


def test_the_next_decode_goes_on_from_all_that_was_kept() -> None:
    session = thinking()
    run = play(session, ["hm", " Now"])
    request = session.next_decode()
    assert request is not None
    assert (request.role, request.segment, request.prefix) == (Role.SMALL, 1, (1, 1))
    assert run.text == "hm Now"


@pytest.mark.parametrize(("before", "fires"), [(2, False), (3, True), (4, True)])
def test_a_cue_counts_after_the_first_tokens_of_its_segment(before: int, fires: bool) -> None:
    session = thinking(min_large_tokens=3)
    session.next_decode()
    session.receive(tokens(*["x "] * before, "Now"))
    assert (not session.decoding) is fires


def test_a_cue_that_came_too_early_is_over() -> None:
    session = thinking(min_large_tokens=3)
    session.next_decode()
    session.receive(tokens("Now", " x", " x", " x"))
    assert session.decoding


def test_a_cue_begun_early_counts_if_a_later_token_completes_it() -> None:
    session = thinking(min_large_tokens=1)
    session.next_decode()
    session.receive(tokens("There", "fore"))
    assert not session.decoding


def test_every_large_segment_has_its_own_first_tokens() -> None:
    session = thinking(min_large_tokens=2)
    play(session, ["x ", "x ", "Now"], [" a."])
    session.next_decode()
    session.receive(tokens(" Now", " x", " Now"))
    assert session.text == "x x Now a. Now x Now"
    assert not session.decoding


def test_tokens_whose_text_comes_late_count_among_the_first() -> None:
    session = thinking_session(make_policy("所", min_large_tokens=2))
    session.next_decode()
    session.receive(DecodeChunk((Piece("", (1,)), Piece("", (2,)), Piece("所", (3,)))))
    assert not session.decoding


def test_a_cue_before_the_thinking_is_none() -> None:
    session = RelaySession(POLICY)
    session.next_decode()
    session.receive(tokens("\n", "<think>", "x", " Now"))
    assert session.text == "\n<think>x Now"


# ---- boundaries ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ([" it", " is", "."], " it is."),
        ([" 3", ".", "14", " m", "."], " 3.14 m."),
        ([" 1", ".", "2", ".", "3", "!"], " 1.2.3!"),
        ([" is", " 446", ".", " Thus"], " is 446."),
        ([" a", "\n", "\n"], " a\n\n"),
        ([" is", "?!"], " is?!"),
        ([" is", '."'], ' is."'),
        ([" it", "\n", "1", ".", " First", "."], " it\n1. First."),
    ],
)
def test_a_sentence_end_hands_back(written: list[str], kept: str) -> None:
    run = play(thinking(), ["Now"], written)
    assert run.written == [("large", "Now"), ("small", kept)]
    assert run.handoffs[1].target is Role.LARGE


def test_a_token_after_a_numbers_end_is_discarded() -> None:
    session = thinking()
    play(session, ["Now"], [" is", " 446", ".", " Thus"])
    assert session.usage == Usage(1, 3, 1, 2)


def test_tokens_of_a_discarded_character_are_discarded_with_it() -> None:
    session = thinking()
    play(session, ["Now"])
    session.next_decode()
    blank = (Piece("", (7,)), Piece("\u3000", (8,)))
    session.receive(DecodeChunk((Piece(" 4", (5,)), Piece(".", (6,)), *blank)))
    assert session.usage == Usage(1, 2, 2, 2)
    request = session.next_decode()
    assert request is not None
    assert request.prefix == (1, 5, 6)


def test_the_small_models_end_of_turn_is_a_boundary() -> None:
    session = thinking()
    run = play(session, ["Now"], [" it"])
    assert triggers(run.outputs)[-1] == (Trigger.BOUNDARY, "")
    assert session.state is State.LARGE


def test_a_small_segment_is_bounded() -> None:
    run = play(thinking(max_small_tokens=3), ["Now"], [" a", " b", " c", " d"])
    assert run.written[1] == ("small", " a b c")
    assert triggers(run.outputs)[-1] == (Trigger.BOUNDARY, "")


def test_the_bound_never_cuts_inside_a_character() -> None:
    session = thinking(max_small_tokens=2)
    play(session, ["Now"])
    session.next_decode()
    for piece in (Piece(" a", (1,)), Piece("", (2,)), Piece("", (3,)), Piece("😀", (4,))):
        assert session.decoding
        session.receive(DecodeChunk((piece,)))
    assert not session.decoding
    assert session.text == "Now a😀"


def test_an_empty_small_segment_goes_back_to_the_large_model() -> None:
    session = thinking()
    run = play(session, ["Now"], [])
    request = session.next_decode()
    assert request is not None
    assert (request.role, request.segment) == (Role.LARGE, 2)
    assert run.written == [("large", "Now")]


def test_a_small_model_that_never_writes_does_not_loop() -> None:
    session = thinking()
    run = play(session, ["Now"], [], ["x"], [], ["446."])
    assert run.requests[-1].role is Role.LARGE
    assert isinstance(run.outputs[-1], Finished)
    assert session.text == "Nowx\n</think>446."


# ---- the end of thinking ------------------------------------------------------------------------


@pytest.mark.parametrize("tag", [["</think>"], ["</", "think", ">"], ["so</think>\n"]])
def test_the_answer_role_writes_what_follows_the_large_models_thinking(tag: list[str]) -> None:
    session = thinking()
    run = play(session, ["hm", *tag], ["446."])
    assert triggers(run.outputs) == [(Trigger.THINK_END, "</think>")]
    assert run.written == [("large", "hm" + "".join(tag)), ("small", "446.")]
    assert session.state is State.DONE


def test_the_small_model_goes_on_if_it_ended_the_thinking_itself() -> None:
    session = thinking()
    run = play(session, ["Now"], [" so", "</think>", "446", ".", "\n\n", "Yes."])
    assert run.written[1:] == [("small", " so</think>446.\n\nYes.")]
    assert len(run.requests) == 2
    assert isinstance(run.outputs[-1], Finished)


def test_the_large_model_takes_the_answer_back_from_the_small_one() -> None:
    run = play(thinking(answer="large"), ["Now"], [" so", "</think>"], ["446. Now", " it"])
    assert run.written[2:] == [("large", "446. Now it")]
    assert triggers(run.outputs)[-1] == (Trigger.THINK_END, "</think>")


def test_the_large_model_goes_on_if_it_answers() -> None:
    run = play(thinking(answer="large"), ["hm", "</think>", "446 Now", "."])
    assert run.written == [("large", "hm</think>446 Now.")]
    assert run.handoffs == []


def test_a_turn_ended_inside_the_thinking_is_closed_and_answered() -> None:
    session = thinking()
    run = play(session, ["hm"], ["446."])
    assert session.text == "hm\n</think>446."
    assert run.written == [("large", "hm\n</think>"), ("small", "446.")]
    assert triggers(run.outputs) == [(Trigger.UNCLOSED, "")]


def test_the_large_model_may_answer_after_its_thinking_was_closed() -> None:
    session = thinking(answer="large")
    run = play(session, ["hm"], ["446."])
    assert run.written == [("large", "hm\n</think>446.")]
    assert run.handoffs == []
    assert session.usage.segments == 1


def test_the_closing_tags_ids_keep_the_handoff_in_tokens() -> None:
    session = thinking_session(POLICY, close_ids=(77, 78))
    run = play(session, ["hm"], ["446."])
    assert run.requests[1].prefix == (1, 77, 78)
    assert session.usage.large_tokens == 1


def test_without_them_the_handoff_goes_on_by_text() -> None:
    run = play(thinking(), ["hm"], ["446."])
    assert run.requests[1].prefix == "hm\n</think>"


def test_an_answer_that_the_small_model_leaves_empty_falls_to_the_large_one() -> None:
    session = thinking()
    run = play(session, ["hm</think>"], [], ["446."])
    assert triggers(run.outputs)[-1] == (Trigger.EMPTY, "")
    assert run.written == [("large", "hm</think>"), ("large", "446.")]
    assert session.state is State.DONE


def test_an_answer_that_both_leave_empty_is_empty() -> None:
    session = thinking()
    run = play(session, ["hm</think>"], [], [])
    assert isinstance(run.outputs[-1], Finished)
    assert session.text == "hm</think>"


def test_the_thinking_the_tag_and_the_answer_are_told_apart() -> None:
    run = play(RelaySession(POLICY), ["<think>", "hm", "</think>"], ["446"])
    assert [(d.kind, d.text) for d in run.deltas] == [
        (DeltaKind.TAG, "<think>"),
        (DeltaKind.REASONING, "hm"),
        (DeltaKind.TAG, "</think>"),
        (DeltaKind.ANSWER, "446"),
    ]


# ---- generations that do not think --------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.UNDECIDED, Phase.ANSWER])
def test_plain_large_leaves_it_to_the_large_model(phase: Phase) -> None:
    session = RelaySession(POLICY, phase=phase)
    run = play(session, [" So", ".", " Now", " it", "."])
    assert run.written == [("large", " So. Now it.")]
    assert isinstance(run.outputs[-1], Finished)


@pytest.mark.parametrize("phase", [Phase.UNDECIDED, Phase.ANSWER])
def test_plain_relay_relays_the_whole_output(phase: Phase) -> None:
    policy = make_policy("Now", plain="relay")
    run = play(RelaySession(policy, phase=phase), ["So ", "Now"], [" it", "."], [" Yes"])
    assert run.written == [("large", "So Now"), ("small", " it."), ("large", " Yes")]
    assert {delta.kind for delta in run.deltas} == {DeltaKind.ANSWER}
    assert isinstance(run.outputs[-1], Finished)


def test_a_turn_ended_before_anything_is_an_empty_generation() -> None:
    session = RelaySession(POLICY)
    run = play(session, [])
    assert run.outputs == [Finished("stop", Usage())]


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("phase", list(Phase))
def test_a_solo_role_writes_everything(role: Role, phase: Phase) -> None:
    written = ["<think>", "Now", ".", "</think>", "Now", "."]
    run = play(RelaySession(POLICY, solo=role, phase=phase), written)
    assert run.written == [(role.value, "".join(written))]
    assert run.end.usage.handoffs == 0


def test_a_solo_small_models_empty_answer_stays_empty() -> None:
    run = play(RelaySession(POLICY, solo=Role.SMALL), [])
    assert run.outputs == [Finished("stop", Usage())]


# ---- limits -------------------------------------------------------------------------------------


def test_the_budget_is_what_the_kept_tokens_leave() -> None:
    session = thinking_session(POLICY, Limits(max_tokens=10, min_tokens=3, seed=7))
    run = play(session, ["x ", "Now"], [" a", " b", "."], ["y"])
    assert [(r.max_tokens, r.min_tokens, r.seed) for r in run.requests] == [
        (10, 3, 7),
        (8, 1, 8),
        (5, 0, 9),
    ]


def test_what_was_not_asked_stays_not_asked() -> None:
    [request] = play(thinking(), ["x"]).requests
    assert (request.max_tokens, request.min_tokens, request.seed) == (None, None, None)


def test_a_cue_that_spends_the_budget_is_the_end() -> None:
    session = thinking_session(POLICY, Limits(max_tokens=2))
    run = play(session, ["x ", "Now"])
    assert (run.end.reason, run.handoffs) == ("length", [])
    assert session.next_decode() is None


def test_an_engine_that_stops_for_length_ends_the_generation() -> None:
    run = play(thinking(), ["Now"], [" it"], end="length")
    assert run.end.reason == "length"


def test_another_reason_of_the_engine_is_passed_on() -> None:
    run = play(thinking(), ["Now"], [" it"], end="content_filter")
    assert run.end.reason == "content_filter"


def test_the_end_of_turn_is_a_kept_token_at_the_end_of_the_generation() -> None:
    session = thinking()
    play(session, ["</think>"])
    session.next_decode()
    session.receive(tokens("446"))
    session.receive(DecodeFinished("stop", 2))
    assert session.usage == Usage(1, 2, 0, 1)


def test_the_end_of_turn_inside_the_generation_is_discarded() -> None:
    session = thinking()
    play(session, ["Now"])
    session.next_decode()
    session.receive(tokens(" it"))
    session.receive(DecodeFinished("stop", 2))
    assert session.usage == Usage(1, 1, 1, 2)


# ---- stop strings -------------------------------------------------------------------------------


def stopping(*stops: str, include: bool = False, **fields: Any) -> RelaySession:
    limits = Limits(stops=stops, include_stop=include)
    return thinking_session(make_policy("Now", **fields), limits)


def test_a_stop_string_ends_the_answer() -> None:
    session = stopping("END")
    run = play(session, ["</think>"], ["446 E", "ND", " more"])
    assert run.written[-1] == ("small", "446 ")
    assert (run.end.reason, run.end.stop) == ("stop", "END")
    assert session.state is State.DONE


def test_a_stop_string_is_included_where_it_is_asked_for() -> None:
    run = play(stopping("END", include=True), ["</think>"], ["446 E", "ND more"])
    assert run.written[-1] == ("small", "446 END")


def test_a_stop_string_in_the_thinking_is_text() -> None:
    run = play(stopping("END"), ["END", "</think>"], ["446"])
    assert run.text == "END</think>446"
    assert run.end.stop is None


def test_it_ends_the_thinking_too_if_the_policy_says_all() -> None:
    run = play(stopping("END", stops="all"), ["hm E", "ND"])
    assert run.text == "hm "
    assert run.end.stop == "END"


def test_a_stop_string_is_found_across_segments() -> None:
    run = play(stopping("w it", stops="all"), ["Now"], [" it", "."])
    assert run.written == [("large", "No")]
    assert run.end.stop == "w it"


def test_half_a_stop_string_is_passed_on_at_the_end() -> None:
    run = play(stopping("END"), ["</think>"], ["446 E", "N"])
    assert run.written[-1] == ("small", "446 EN")


@pytest.mark.parametrize("handoff", ["tokens", "text"])
def test_a_stop_string_of_blanks_is_found_at_the_end(handoff: str) -> None:
    limits = Limits(stops=("\n",))
    session = thinking_session(make_policy("Now"), limits, handoff=handoff)
    run = play(session, ["</think>"], ["446", "\n"], end="length")
    assert run.written[-1] == ("small", "446")
    assert (run.end.reason, run.end.stop) == ("stop", "\n")


# ---- the form of the prefix ---------------------------------------------------------------------


def test_substring_cuts_inside_a_token_and_goes_on_by_text() -> None:
    policy = make_policy("now", match="substring", boundary="substring")
    session = thinking_session(policy)
    assert session.handoff == "tokens"
    run = play(session, ["I", " knowing"], [" 3", ".14"], [])
    assert session.handoff == "text"
    assert [request.prefix for request in run.requests] == [(), "I know", "I know 3."]


def test_substring_at_a_tokens_end_keeps_the_ids() -> None:
    session = thinking_session(make_policy("now", match="substring"))
    run = play(session, ["I", " know"], ["."])
    assert run.requests[1].prefix == (1, 1)


def test_the_answer_is_reopened_if_the_tag_was_cut_inside_its_token() -> None:
    policy = make_policy("Now", match="substring", answer="large")
    run = play(thinking_session(policy), ["hm", "</think>Now, "], [" 446"])
    assert [request.role for request in run.requests] == [Role.LARGE, Role.LARGE]
    assert run.text == "hm</think>Now 446"


def test_a_piece_without_ids_makes_the_handoff_text() -> None:
    session = thinking()
    session.next_decode()
    session.receive(DecodeChunk((Piece("Now"),)))
    request = session.next_decode()
    assert request is not None
    assert request.prefix == "Now"


def test_a_text_prefix_leaves_its_last_blank_to_the_next_model() -> None:
    session = thinking_session(POLICY, handoff="text")
    run = play(session, ["hm ", "Now, "], [" it", ".\n"], ["\nSo"])
    assert [request.prefix for request in run.requests] == ["", "hm Now,", "hm Now, it."]
    assert run.text == "hm Now, it.\nSo\n</think>"


def test_a_text_generations_last_blank_is_text() -> None:
    session = thinking_session(POLICY, handoff="text")
    run = play(session, ["</think>"], ["446.", "\n"])
    assert run.text == session.text == "</think>446.\n"


def test_the_budgets_end_keeps_a_last_blank_too() -> None:
    session = thinking_session(POLICY, Limits(max_tokens=2), handoff="text")
    run = play(session, ["hm ", "Now\n"])
    assert run.text == "hm Now\n"


def test_the_reference_sends_a_last_blank() -> None:
    session = thinking_session(POLICY, handoff="text", move_blanks=False)
    run = play(session, ["Now, "], ["it"])
    assert run.requests[1].prefix == "Now, "


def test_what_comes_after_a_stop_string_is_counted_as_discarded() -> None:
    session = RelaySession(POLICY, Limits(stops=("END",)), phase=Phase.ANSWER)
    session.next_decode()
    outputs = session.receive(tokens("a", "END", "b", "c"))
    assert outputs[-1] == Finished("stop", Usage(large_tokens=2, discarded_tokens=2), "END")


# ---- failures, leaving, misuse ------------------------------------------------------------------


def test_a_broken_decode_fails_the_generation_and_keeps_what_was_kept() -> None:
    session = thinking_session(POLICY, handoff="text")
    session.next_decode()
    session.receive(tokens("hm ", "</"))
    outputs = session.receive(DecodeFailed("connection reset"))
    assert outputs[-1] == Failed("connection reset", Usage(large_tokens=2))
    assert (session.text, session.state) == ("hm </", State.FAILED)
    assert session.next_decode() is None


def test_tokens_without_text_are_discarded_when_the_decode_breaks() -> None:
    session = thinking()
    session.next_decode()
    session.receive(DecodeChunk((Piece("", (1,)), Piece("", (2,)))))
    session.receive(DecodeFailed("connection reset"))
    assert session.usage == Usage(discarded_tokens=2)


def test_a_client_that_leaves_ends_the_generation() -> None:
    session = thinking()
    session.next_decode()
    session.receive(tokens("hm"))
    session.cancel()
    assert session.state is State.CANCELLED
    assert not session.decoding
    assert session.next_decode() is None


def test_a_client_may_leave_before_the_first_decode_and_twice() -> None:
    session = thinking()
    session.cancel()
    session.cancel()
    assert session.next_decode() is None


def test_a_client_that_leaves_after_the_end_changes_nothing() -> None:
    session = RelaySession(POLICY)
    play(session, ["446"])
    session.cancel()
    assert session.state is State.DONE


def test_a_second_decode_while_one_is_open_is_misuse() -> None:
    session = thinking()
    session.next_decode()
    with pytest.raises(LocalMisuseError, match="while a decode is open"):
        session.next_decode()


def test_an_event_while_no_decode_is_open_is_misuse() -> None:
    with pytest.raises(LocalMisuseError, match="no decode is open"):
        thinking().receive(END_OF_TURN)


def test_each_role_has_the_other() -> None:
    assert (Role.LARGE.other, Role.SMALL.other) == (Role.SMALL, Role.LARGE)
