"""The token ledger."""

from __future__ import annotations

import pytest

from relaygen.usage import Ledger, Usage


def test_nothing_is_counted_at_the_start() -> None:
    assert Ledger().usage() == Usage(0, 0, 0, 0)


def test_kept_tokens_count_for_the_role_that_decoded_them() -> None:
    ledger = Ledger()
    ledger.keep(3, large=True)
    ledger.keep(5, large=False)
    assert (ledger.large, ledger.small, ledger.kept) == (3, 5, 8)


def test_completion_tokens_are_large_and_small_without_the_discarded() -> None:
    assert Usage(large_tokens=3, small_tokens=5, discarded_tokens=7).completion_tokens == 8


def test_there_is_one_segment_more_than_handoffs() -> None:
    assert Usage(handoffs=4).segments == 5


def test_large_utilization_is_the_large_share_of_the_kept_tokens() -> None:
    assert Usage(large_tokens=1, small_tokens=3, discarded_tokens=9).large_utilization == 0.25


def test_large_utilization_of_nothing_is_none() -> None:
    assert Usage().large_utilization == 0.0


def test_usages_add_up() -> None:
    one, other = Usage(1, 2, 3, 4), Usage(10, 20, 30, 40)
    assert one + other == Usage(11, 22, 33, 44)
    assert sum([one, other], start=Usage()) == Usage(11, 22, 33, 44)


@pytest.mark.parametrize(("one", "other"), [(True, False), (False, True), (True, True)])
def test_a_sum_with_an_estimate_in_it_is_one(one: bool, other: bool) -> None:
    assert (Usage(estimated=one) + Usage(estimated=other)).estimated
    assert not (Usage() + Usage()).estimated


def test_what_is_withdrawn_was_discarded() -> None:
    ledger = Ledger()
    ledger.keep(3, large=True)
    ledger.keep(5, large=False)
    ledger.discarded = 2
    ledger.withdraw()
    assert ledger.usage() == Usage(discarded_tokens=10)
    assert ledger.kept == 0
