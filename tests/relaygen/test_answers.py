"""Final answers of replies, and which of them are the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygen.answers import agree, final_answer


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("<think>2 + 2 = 5</think>It is 4.", "4"),
        ("no thinking: 7", "7"),
        ("</think>", None),
        ("<think>4</think>  \n", None),
        (r"</think>First \boxed{3}, no: \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"</think>\boxed{5}, and \boxed{ never closed", "5"),
        (r"</think>\boxed{ never closed, 6", "6"),
        (r"</think>So it is \frac{3}{4}", "3/4"),
        ("</think>It costs 1,234.50 in all", "1,234.50"),
        ("</think>Paris, of  course!", "paris of course"),
        ("</think>...", "..."),
    ],
)
def test_the_final_answer(reply: str, answer: str | None) -> None:
    assert final_answer(reply) == answer


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("4", "4.0", True),
        ("1,000", "1000", True),
        ("1/2", "0.5", True),
        (r"\frac{1}{2}", "2/4", True),
        (r"$\dfrac{1}{2}$", "0.5", True),
        ("1/0", "1/0", True),
        ("1/0", "1", False),
        (r"\left( 1, 2 \right)", "(1,2)", True),
        ("Paris", "paris.", True),
        ("Paris", "Rome", False),
        ("4", "5", False),
        (None, None, False),
        (None, "4", False),
        ("4", None, False),
    ],
)
def test_which_are_the_same(one: str | None, other: str | None, same: bool) -> None:
    assert agree(one, other) is same


@given(st.text())
def test_any_text_agrees_with_itself(text: str) -> None:
    answer = final_answer(text)
    assert agree(answer, answer) is (answer is not None)


@given(st.text(), st.text())
def test_agreement_has_no_order(one: str, other: str) -> None:
    assert agree(one, other) is agree(other, one)
