"""What a list of cues will bring."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygen.calibration.projection import Replayed, Speeds, replayed, replayed_all, roles
from relaygen.events import Role
from relaygen.policy import Policy
from relaygen.replay import _TOKEN, replay
from tests.relaygen.calibration.support import make_scored, make_trace, session_roles, tokens
from tests.relaygen.support import make_policy, policies

L, S = Role.LARGE, Role.SMALL
FRAGMENTS = (
    *(
        "Now",
        " so",
        ".",
        " 3.14",
        "\n\n",
        "know",
        "所以",
        " ",
        "!",
        "1. ",
        "</think>",
        " it is",
        "?",
    ),
)
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=20).map("".join)


def written(policy: Policy, *tokens: str) -> list[tuple[Role, str]]:
    found = roles(policy, make_trace(tokens))
    return [(role, "".join(tokens[span.start : span.end])) for role, span in found]


def test_cues_hand_over_and_sentence_ends_hand_back() -> None:
    tokens = ["<think>", "Now", " it", " is", " 3", ".", "14", ".", " So", "</think>", " 3"]
    assert written(make_policy("Now"), *tokens) == [
        (L, "<think>Now"),
        (S, " it is 3.14."),
        (L, " So</think>"),
        (S, " 3"),
    ]


def test_the_role_that_answers_anyway_goes_on() -> None:
    assert written(make_policy("Now"), "Now", " a", "</think>", " b") == [
        (L, "Now"),
        (S, " a</think> b"),
    ]
    large = make_policy("Now", answer="large")
    assert written(large, "a", "</think>", " b") == [(L, "a</think> b")]


def test_a_large_segment_keeps_its_least_tokens() -> None:
    policy = make_policy("Now", min_large_tokens=2)
    assert written(policy, "Now", " Now", " Now", " a") == [(L, "Now Now Now"), (S, " a")]


def test_a_small_segment_has_its_most_tokens() -> None:
    policy = make_policy("Now", max_small_tokens=1)
    assert written(policy, "Now", " a", " b") == [(L, "Now"), (S, " a"), (L, " b")]


def test_nothing_is_written_of_nothing() -> None:
    assert written(make_policy("Now")) == []


@given(policies(), tokens)
def test_roles_are_those_of_the_session(policy: Policy, tokens: list[str]) -> None:
    assert list(roles(policy, make_trace(tokens))) == list(session_roles(policy, tokens))


@given(st.sampled_from([("Now",), ("so", "Now"), ("所以", "it is")]), texts)
def test_roles_are_those_of_a_replay_of_the_same_tokens(cues: tuple[str, ...], text: str) -> None:
    policy = make_policy(*cues)
    replays = [
        (role, "".join(segment.text for segment in segments))
        for role, segments in groupby(replay(policy, text), key=lambda segment: segment.role)
    ]
    assert written(policy, *_TOKEN.findall(text)) == replays


# ---- sums ---------------------------------------------------------------------------------------

TEXTS = ["<think>", "Now", " a", ".", " So", " Now", " b", ".", " c", "</think>", " d", "."]


def test_the_sums_of_one_trace() -> None:
    sums = replayed(make_policy("Now"), [make_scored(TEXTS)], 0.9)
    assert sums == Replayed(traces=1, large=6, small=6, handoffs=5, segments=2, clean=1)
    assert (sums.large_share, sums.quality) == (0.5, 1.0)


def test_a_trace_with_a_wrong_segment_is_not_clean() -> None:
    wrong = make_scored(TEXTS, hits=[i != 6 for i in range(len(TEXTS))])
    sums = replayed(make_policy("Now"), [wrong, make_scored(TEXTS)], 0.9)
    assert (sums.traces, sums.clean, sums.quality) == (2, 1, 0.5)


def test_a_token_the_large_model_was_not_sure_of_makes_nothing_wrong() -> None:
    hits = [i != 6 for i in range(len(TEXTS))]
    own = [0.5 if i == 6 else 1.0 for i in range(len(TEXTS))]
    assert replayed(make_policy("Now"), [make_scored(TEXTS, hits=hits, own=own)], 0.9).clean == 1


@pytest.mark.parametrize("texts", [TEXTS, ["Now", " a", "</think>", " d", "."]])
def test_the_answer_makes_no_segment_wrong(texts: list[str]) -> None:
    hits = [i < texts.index("</think>") for i in range(len(texts))]
    sums = replayed(make_policy("Now"), [make_scored(texts, hits=hits)], 0.9)
    assert (sums.clean, sums.segments) == (1, texts.count("Now") + texts.count(" Now"))


def test_without_cues_the_large_model_thinks_alone() -> None:
    sums = replayed(make_policy(), [make_scored(TEXTS)], 0.9)
    assert sums == Replayed(traces=1, large=10, small=2, handoffs=1, segments=0, clean=1)


@given(policies(), st.lists(tokens, max_size=3))
def test_every_token_is_somebodys(policy: Policy, traces: list[list[str]]) -> None:
    sums = replayed(policy, map(make_scored, traces), 0.9)
    assert sums.large + sums.small == sum(map(len, traces))
    assert sums.handoffs >= sums.segments - sums.traces
    assert sums.clean <= sums.traces == len(traces)


def test_with_many_lists_the_traces_are_read_once() -> None:
    lists = [(), ("Now",), ("So", "Now")]
    once = iter([make_scored(TEXTS)])
    assert replayed_all(make_policy("x"), lists, once, 0.9) == [
        replayed(make_policy(*words), [make_scored(TEXTS)], 0.9) for words in lists
    ]


# ---- speed --------------------------------------------------------------------------------------


def test_the_speed_up_is_of_wall_times() -> None:
    sums = Replayed(traces=1, large=60, small=40, handoffs=10)
    # alone 100 * 20; relayed 60 * 20 + 40 * 5 + 10 * 10
    assert sums.speed_up(Speeds(20, 5, 10)) == pytest.approx(2000 / 1500)


def test_at_the_break_even_cost_nothing_is_gained() -> None:
    sums = Replayed(traces=1, large=60, small=40, handoffs=10)
    cost = sums.break_even_ms(Speeds(20, 5))
    assert cost is not None
    assert cost == pytest.approx(40 * 15 / 10)
    assert sums.speed_up(Speeds(20, 5, cost)) == pytest.approx(1.0)


def test_nothing_has_neither_share_nor_speed_up() -> None:
    nothing = Replayed()
    assert (nothing.large_share, nothing.quality) == (1.0, 1.0)
    assert nothing.speed_up(Speeds(20, 5)) == 1.0
    assert nothing.break_even_ms(Speeds(20, 5)) is None
