"""Problems are the same for a seed, and graded by the last integer of the answer."""

from __future__ import annotations

import re

import pytest

from gateway.demo.problems import Problem, is_right, problems


def test_a_seed_gives_the_same_problems_in_the_same_order() -> None:
    assert problems(20, seed=3) == problems(20, seed=3)
    assert problems(20, seed=3)[:5] == problems(5, seed=3)


def test_other_seeds_give_other_problems() -> None:
    assert not set(problems(50, seed=3)) & set(problems(50, seed=4))


def test_no_problem_comes_twice() -> None:
    found = problems(300, seed=0)
    assert len({problem.question for problem in found}) == 300


def test_the_expected_result_is_the_value_of_the_expression() -> None:
    for problem in problems(100, seed=5):
        expression = re.search(r"\d[\d*+\- ]*\d", problem.question)
        assert expression and re.fullmatch(r"[\d*+\- ]+", expression.group())
        assert eval(expression.group()) == problem.expected


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("The final answer is 42.", True),
        ("So 6*8 - 6 = 42.", True),
        ("The final answer is 43.", False),
        ("42 is not it, 41 is.", False),
        ("The final answer is 142.", False),
        ("The final answer is -42.", False),
        ("", False),
        ("no number", False),
        ("<think>\nIt is 7.\n</think>\n\nThe value is 42.", True),
        ("<think>\nIt is 42.\n</think>\n\nThe value is 7.", False),
        ("<think>\nIt is 42.\n</think>\n\n", False),
        ("<think>\nIt is 42", False),
    ],
)
def test_grading(reply: str, right: bool) -> None:
    assert is_right(Problem("What is 6*8 - 6?", 42), reply) is right


def test_a_negative_result_is_graded_with_its_sign() -> None:
    assert is_right(Problem("q", -5), "It is -5.")
    assert not is_right(Problem("q", -5), "It is 5.")
