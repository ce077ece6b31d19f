"""A policy's YAML: typed policy or problems that the user can mend."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from relaygen.errors import PolicyError, Problem
from relaygen.events import Role
from relaygen.policy import Policy, load_policy, policy_warnings

SOURCE = "pair.yaml"
MINIMAL: dict[str, Any] = {
    "version": 1,
    "name": "pair",
    "large": {"backend": "large", "model": "L"},
    "small": {"backend": "small", "model": "S"},
    "cues": {"words": ["Thus"]},
}


def load(**changes: Any) -> Policy:
    return load_policy(yaml.safe_dump(MINIMAL | changes, allow_unicode=True), SOURCE)


def problems(text: str) -> list[Problem]:
    """What is wrong with a policy; each problem says where and what to do."""
    with pytest.raises(PolicyError) as raised:
        load_policy(text, SOURCE)
    found = list(raised.value.problems)
    assert found
    for problem in found:
        assert problem.source == SOURCE
        assert problem.field
        assert problem.message
        assert problem.remedy
        assert str(problem) in str(raised.value)
    return found


def problem(**changes: Any) -> Problem:
    [only] = problems(yaml.safe_dump(MINIMAL | changes, allow_unicode=True))
    return only


# ---- what is right ------------------------------------------------------------------------------


def test_the_rest_has_the_documented_defaults() -> None:
    spec = {"tokenizer": "auto", "sampling": {}}
    pace = {"first_token": None, "tokens_per_second": None}
    assert load().model_dump(mode="json") == {
        **MINIMAL,
        "large": {"backend": "large", "model": "L", **spec},
        "small": {"backend": "small", "model": "S", **spec},
        "sampling": {},
        "thinking": {"open": "<think>", "close": "</think>", "field": "reasoning_content"},
        "cues": {"match": "word", "words": ["Thus"]},
        "boundary": {"match": "sentence", "ends": [".", "!", "?", "\n\n"]},
        "answer": "small",
        "tools": "large",
        "plain": "large",
        "min_large_tokens": 5,
        "max_small_tokens": 256,
        "handoff": "auto",
        "stops": "answer",
        "on_failure": {"large": "fail", "small": "large"},
        "slow": {"large": pace, "small": pace, "hold": True},
        "overlap": False,
        "warm_every_tokens": 0,
        "calibration": {},
    }


def test_json_is_yaml_too() -> None:
    policy = load()
    assert load_policy(policy.model_dump_json(), SOURCE) == policy


def test_anchors_and_merge_keys_share_what_both_models_have() -> None:
    text = """
        version: 1
        name: pair
        large: &both {backend: large, model: L, sampling: {temperature: 0.6}}
        small: {<<: *both, model: S}
        cues: {words: []}
    """
    assert load_policy(text, SOURCE).small.sampling == {"temperature": 0.6}


def test_each_role_has_its_model() -> None:
    policy = load()
    assert [policy.spec(role).model for role in (Role.LARGE, Role.SMALL)] == ["L", "S"]


def test_the_cues_and_boundaries_are_compiled_once() -> None:
    policy = load()
    assert policy.cue_set is policy.cue_set
    assert policy.boundary_set is policy.boundary_set


@pytest.mark.parametrize("handoff", ["auto", "text"])
def test_substring_cues_go_with_text(handoff: str) -> None:
    assert load(cues={"match": "substring", "words": [" now"]}, handoff=handoff).cues.words


def test_no_cues_are_allowed() -> None:
    assert load(cues={"words": []}).cues.words == ()


# ---- what is wrong ------------------------------------------------------------------------------


def test_an_unknown_key_is_refused_with_those_known_there() -> None:
    found = problem(answers="small")
    assert (found.field, found.message) == ("answers", "unknown key")
    assert "answer" in found.remedy


def test_an_unknown_key_inside_a_section_names_that_sections_keys() -> None:
    found = problem(large={"backend": "large", "model": "L", "url": "http://large"})
    assert str(found) == (
        "pair.yaml: large.url: unknown key; known here: backend, model, tokenizer, sampling"
    )


def test_a_missing_key_is_named() -> None:
    found = problems("version: 1\nname: pair\n")
    assert [(p.field, p.message) for p in found] == [
        (field, "required, but missing") for field in ("large", "small", "cues")
    ]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"version": 2}, "version"),
        ({"version": "1"}, "version"),
        ({"name": 7}, "name"),
        ({"name": ""}, "name"),
        ({"large": "L"}, "large"),
        ({"cues": {"words": "Thus"}}, "cues.words"),
        ({"cues": {"words": [None]}}, "cues.words[0]"),
        ({"cues": {"words": ["Thus", ""]}}, "cues.words[1]"),
        ({"cues": {"match": "regex", "words": []}}, "cues.match"),
        ({"boundary": {"ends": []}}, "boundary.ends"),
        ({"boundary": {"ends": [".", ""]}}, "boundary.ends[1]"),
        ({"thinking": {"field": "thoughts"}}, "thinking.field"),
        ({"answer": "medium"}, "answer"),
        ({"plain": "small"}, "plain"),
        ({"handoff": "ids"}, "handoff"),
        ({"stops": "none"}, "stops"),
        ({"min_large_tokens": -1}, "min_large_tokens"),
        ({"min_large_tokens": "5"}, "min_large_tokens"),
        ({"min_large_tokens": True}, "min_large_tokens"),
        ({"max_small_tokens": 0}, "max_small_tokens"),
        ({"max_small_tokens": 1.5}, "max_small_tokens"),
        ({"sampling": [0.6]}, "sampling"),
        ({"calibration": "none"}, "calibration"),
    ],
)
def test_a_wrong_value_is_refused_where_it_stands(changes: dict[str, Any], field: str) -> None:
    assert problem(**changes).field == field


def test_another_version_is_refused_with_the_one_known() -> None:
    assert "should be 1, got 2" in problem(version=2).message


def test_every_problem_is_told_at_once() -> None:
    found = problems(yaml.safe_dump(MINIMAL | {"plain": 1, "stops": 2, "extra": 3}))
    assert {p.field for p in found} == {"plain", "stops", "extra"}


def test_a_long_value_is_shown_in_part() -> None:
    message = problem(answer="x" * 500).message
    assert len(message) < 120
    assert message.endswith("...")


@pytest.mark.parametrize("word", ["No", "Yes", "On", "off"])
def test_an_unquoted_no_is_explained(word: str) -> None:
    text = yaml.safe_dump(MINIMAL).replace("- Thus", f"- {word}")
    [found] = problems(text)
    assert found.field == "cues.words[0]"
    assert "quotes" in found.remedy


def test_a_quoted_no_is_a_cue() -> None:
    text = yaml.safe_dump(MINIMAL).replace("- Thus", '- "No"')
    assert load_policy(text, SOURCE).cues.words == ("No",)


@pytest.mark.parametrize("word", [" ", "\n", "\t "])
@pytest.mark.parametrize("match", ["word", "substring"])
def test_a_blank_cue_is_refused(word: str, match: str) -> None:
    found = problem(cues={"match": match, "words": ["Thus", word]})
    assert (found.field, found.message) == ("cues.words[1]", "a cue must not be empty or blank")


@pytest.mark.parametrize("word", [" Now", "Now ", "\nNow"])
def test_a_whole_word_cue_with_a_blank_at_its_edge_is_refused(word: str) -> None:
    found = problem(cues={"words": [word]})
    assert found.field == "cues.words[0]"
    assert "'Now'" in found.remedy


@pytest.mark.parametrize(
    "changes",
    [
        {"cues": {"match": "substring", "words": ["now"]}},
        {"boundary": {"match": "substring"}},
    ],
)
def test_ids_can_not_follow_cuts_inside_tokens(changes: dict[str, Any]) -> None:
    assert problem(handoff="tokens", **changes).field == "handoff"


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("name: a\nname: b\n", "line 2, column 1", "key 'name' is given twice"),
        ("large:\n  model: a\n  'model': b\n", "line 3, column 3", "key 'model' is given twice"),
        ("cues: [", "line 1, column 8", "not valid YAML"),
        ("a: b: c", "line 1, column 5", "not valid YAML"),
        ("a: *b", "line 1, column 4", "undefined alias"),
        ("a: !!python/name:os.system x", "line 1, column 4", "not valid YAML"),
        ("{[a]: 1}", "line 1, column 2", "unhashable key"),
        ("\0", "(file)", "not valid YAML"),
        ("name: 2024-13-45", "(file)", "month must be in 1..12"),
        ("name: !!int ''", "(file)", "not what it looks like"),
        ("name: !!bool maybe", "(file)", "not what it looks like"),
        ("name: !!timestamp x", "(file)", "not what it looks like"),
        ("[" * 600, "line 1, column 51", "nested too deeply: at most 50 levels"),
        ("a: &x 1\nb: &x 2", "line 2, column 4", "duplicate anchor 'x'"),
        ("a: &x [*x]", "line 1, column 8", "alias 'x' is inside of what it stands for"),
        ("&x {<<: *x}", "line 1, column 9", "alias 'x' is inside of what it stands for"),
        ("version: " + "1" * 101, "line 1, column 10", "a number of 101 characters"),
        ("version: 1" + ":0" * 99, "line 1, column 10", "a number of 199 characters"),
        ("version: !!float " + "1" * 101, "line 1, column 10", "a number of 101 characters"),
        ("x" * (2**20 + 1), "(file)", "is too large: a policy may have 1048576 characters"),
        ("", "(file)", "expected a mapping of keys, got nothing"),
        ("- a", "(file)", "expected a mapping of keys, got list"),
    ],
)
def test_bad_yaml_is_refused_where_it_goes_wrong(text: str, field: str, message: str) -> None:
    [found] = problems(text)
    assert found.field == field
    assert message in found.message


def bomb(first: str, level: str) -> str:
    """What doubles on each of 40 lines."""
    lines = (f"l{i}: &a{i} {level.format(f'*a{i - 1}')}" for i in range(1, 40))
    return "\n".join([f"l0: &a0 {first}", *lines])


@pytest.mark.parametrize(
    "text",
    [
        bomb("[lol]", "[{0}, {0}]"),
        bomb("{k: lol}", "{{x: {0}, y: {0}}}"),
        bomb("{k: lol}", "{{<<: [{0}, {0}]}}"),
        "[" + "a," * 50_001 + "]",
    ],
)
def test_more_values_than_a_policy_can_need_are_refused(text: str) -> None:
    [found] = problems(text)
    assert found.field.startswith("line ")
    assert "more than 50000 values" in found.message


def test_anchors_and_merge_keys_may_be_used() -> None:
    text = yaml.safe_dump(MINIMAL) + "sampling: &s {top_p: 0.9}\ncalibration: {a: *s, <<: *s}\n"
    assert load_policy(text, SOURCE).calibration == {"a": {"top_p": 0.9}, "top_p": 0.9}


@pytest.mark.parametrize(
    "value",
    ["2024-01-01", ".nan", "-.inf", "!!set {a}", "!!binary aGk=", "18446744073709551616",
     "[{a: .inf}]", "{1: a}"],
)  # fmt: skip
def test_sampling_that_no_request_can_hold_is_refused(value: str) -> None:
    for field in ("sampling", "large.sampling", "small.sampling"):
        changes: dict[str, Any] = {field: {"t": "?"}}
        if "." in field:
            role = field.partition(".")[0]
            changes = {role: {**MINIMAL[role], "sampling": {"t": "?"}}}
        text = yaml.safe_dump(MINIMAL | changes).replace("'?'", value)
        [found] = problems(text)
        assert found.field == f"{field}.t"
        assert "expected what JSON can hold" in found.message


def test_sampling_may_be_any_json() -> None:
    sampling = {"a": None, "b": True, "c": "x", "d": [1, 0.5], "e": {"f": -1}}
    assert load(sampling=sampling).sampling == sampling


@pytest.mark.parametrize("field", ["min_large_tokens", "max_small_tokens"])
def test_counts_that_no_engine_takes_are_refused(field: str) -> None:
    assert "less than or equal to 2147483647" in problem(**{field: 2**31}).message


yaml_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)
keys = st.sampled_from([*Policy.model_fields, "extra"]) | st.integers() | st.none()


@given(st.text() | st.text("{}[]:-,&*!?|>'\"%@` \n\tab01<~=._"))
def test_any_text_is_a_policy_or_a_policy_error(text: str) -> None:
    with suppress(PolicyError):
        load_policy(text, SOURCE)


@given(st.dictionaries(keys, yaml_values, max_size=5))
def test_any_yaml_is_a_policy_or_a_policy_error(changes: dict[Any, Any]) -> None:
    with suppress(PolicyError):
        load_policy(yaml.safe_dump(MINIMAL | changes), SOURCE)


# ---- what is allowed but surely not meant -------------------------------------------------------


@pytest.mark.parametrize(
    ("match", "words", "hidden"),
    [
        ("word", ["Thus", "Thus,"], ["cues.words[1]"]),
        ("word", ["Thus,", "Thus"], ["cues.words[0]"]),
        ("word", ["Thus", "Now", "Thus"], ["cues.words[2]"]),
        ("word", ["now", "know"], []),
        ("word", ["Thus", "Now", "Therefore"], []),
        ("substring", ["now", "know"], ["cues.words[1]"]),
        ("substring", ["a", "ab", "abc"], ["cues.words[1]", "cues.words[2]"]),
        ("word", [], []),
    ],
)
def test_hidden_cues_are_warned_of(match: str, words: list[str], hidden: list[str]) -> None:
    warnings = policy_warnings(load(cues={"match": match, "words": words}), SOURCE)
    assert [warning.field for warning in warnings] == hidden


def test_a_warning_says_which_cue_hides_which() -> None:
    [warning] = policy_warnings(load(cues={"words": ["Thus", "Thus,"]}), SOURCE)
    assert str(warning) == (
        "pair.yaml: cues.words[1]: cue 'Thus,' is hidden by cue 'Thus' (cues.words[0]), "
        "which is complete no later; remove one of them"
    )


def test_a_problem_without_a_remedy_still_says_where_and_what() -> None:
    assert str(Problem(SOURCE, "name", "is odd")) == "pair.yaml: name: is odd"


def test_each_role_has_its_pace() -> None:
    policy = load(slow={"small": {"first_token": 0.5}})
    assert [policy.slow.of(role).first_token for role in (Role.LARGE, Role.SMALL)] == [None, 0.5]


@pytest.mark.parametrize(
    ("changes", "ahead"), [({}, False), ({"overlap": True}, True), ({"warm_every_tokens": 4}, True)]
)
def test_it_tells_whether_engines_work_ahead(changes: dict[str, Any], ahead: bool) -> None:
    assert load(**changes).works_ahead == ahead


@pytest.mark.parametrize(
    ("calibration", "share"),
    [
        ("{}", None),
        ("{expected: 3}", None),
        ("{expected: {small_share: a}}", None),
        ("{expected: {small_share: 1.5}}", None),
        ("{expected: {small_share: 0.25}}", 0.75),
    ],
)
def test_the_large_models_share_is_what_calibration_expects(
    calibration: str, share: float | None
) -> None:
    text = (
        "version: 1\nname: p\nlarge: {backend: l, model: m}\nsmall: {backend: s, model: n}\n"
        f"cues: {{words: [Now]}}\ncalibration: {calibration}\n"
    )
    assert load_policy(text, "test").expected_large_share == share
