"""What is different in two policies."""

from __future__ import annotations

from relaygen.policy import Policy, load_policy
from relaygen.policy_diff import CueDifference, Difference, cue_differences, differences

BASE = """
version: 1
name: {name}
large: {{backend: large, model: big}}
small: {{backend: small, model: tiny}}
cues: {{words: [{words}]}}
"""


def policy(more: str = "", words: str = "Now, So", name: str = "a") -> Policy:
    return load_policy(BASE.format(name=name, words=words) + more, "test")


def test_a_policy_differs_not_from_itself() -> None:
    assert differences(policy(), policy()) == []
    assert cue_differences(policy(), policy()) == []


def test_fields_are_told_by_their_path() -> None:
    other = policy(
        "min_large_tokens: 9\nsampling: {top_k: 3}\non_failure: {large: small}", name="b"
    )
    assert differences(policy(), other) == [
        Difference("name", "a", "b"),
        Difference("min_large_tokens", 5, 9),
        Difference("on_failure.large", "fail", "small"),
        Difference("sampling.top_k", None, 3),
    ]


def test_what_calibration_expects_is_told_and_the_rest_is_not() -> None:
    old = policy("calibration: {date: x, expected: {small_share: 0.2}}")
    new = policy("calibration: {date: y, expected: {small_share: 0.3}}")
    assert differences(old, new) == [Difference("calibration.expected.small_share", 0.2, 0.3)]


def test_cues_come_with_what_calibration_found_of_them() -> None:
    found = "calibration: {cues: {Thus: {count: 9, mean: 0.99, low: 0.1, p: 0.0}, So: 3}}"
    assert cue_differences(policy(), policy(found, words="Now, Thus, We")) == [
        CueDifference("So", False, {}),
        CueDifference("Thus", True, {"count": 9, "mean": 0.99, "low": 0.1}),
        CueDifference("We", True, {}),
    ]
    assert cue_differences(policy("calibration: {cues: {So: 3}}"), policy(words="Now")) == [
        CueDifference("So", False, {})
    ]
