"""The comparison's arithmetic, with numbers worked by hand."""

from __future__ import annotations

import pytest

from gateway.demo.ask import RelayUsage, Reply
from gateway.demo.report import markdown, summary
from gateway.demo.result import Comparison, Mode, ModeResult, summed


def _result(mode: Mode, large: int, small: int, wall_s: float, decode_s: float) -> ModeResult:
    return ModeResult(
        mode=mode, problems=2, right=1, large_tokens=large, small_tokens=small,
        discarded_tokens=0, handoffs=0, wall_s=wall_s, decode_s=decode_s, first_token_s=0.05,
    )  # fmt: skip


@pytest.fixture
def found() -> Comparison:
    return Comparison(
        seed=1,
        large=_result(Mode.LARGE, 202, 0, wall_s=2.1, decode_s=2.0),  # 2.0 s / 200: 10 ms
        small=_result(Mode.SMALL, 0, 102, wall_s=0.3, decode_s=0.2),  # 0.2 s / 100: 2 ms
        relay=_result(Mode.RELAY, 102, 100, wall_s=1.43, decode_s=1.3),
    )


def test_ms_per_token_leaves_the_first_token_of_each_reply_out(found: Comparison) -> None:
    assert found.large.ms_per_token == pytest.approx(10)
    assert found.small.ms_per_token == pytest.approx(2)


def test_ideal_is_first_tokens_and_each_roles_tokens_at_its_own_speed(found: Comparison) -> None:
    # 2 first tokens of 50 ms bring 2 of the 102 large tokens; 100 * 10 ms + 100 * 2 ms follow.
    assert found.ideal_s == pytest.approx(0.1 + 1.0 + 0.2)


def test_ratios(found: Comparison) -> None:
    assert found.relay_to_large == pytest.approx(1.43 / 2.1)
    assert found.relay_to_ideal == pytest.approx(1.43 / 1.3)


def test_shares(found: Comparison) -> None:
    assert found.relay.small_share == pytest.approx(100 / 202)
    assert found.large.small_share == 0
    assert found.small.small_share == 1
    assert found.relay.accuracy == 0.5


def test_a_modes_sums_come_from_its_replies() -> None:
    replies = [
        Reply(tokens=12, relay=RelayUsage(8, 4, 1, 2, 3.0), first_s=0.1, end_s=0.5, wall_s=0.6),
        Reply(tokens=10, relay=RelayUsage(10, 0, 0, 0, None), first_s=0.3, end_s=0.4, wall_s=0.4),
        Reply(tokens=20, relay=RelayUsage(9, 11, 2, 4, 5.0), first_s=0.2, end_s=0.9, wall_s=1.0),
    ]
    result = summed(Mode.RELAY, replies, right=2)
    assert (result.large_tokens, result.small_tokens, result.discarded_tokens) == (27, 15, 3)
    assert (result.handoffs, result.handoff_ms_p50) == (6, 4.0)
    assert result.wall_s == pytest.approx(2.0)
    assert result.decode_s == pytest.approx(0.4 + 0.1 + 0.7)
    assert result.first_token_s == pytest.approx(0.2)


@pytest.mark.parametrize(("mode", "tokens"), [(Mode.LARGE, (7, 0)), (Mode.SMALL, (0, 7))])
def test_an_engines_own_tokens_are_its_roles(mode: Mode, tokens: tuple[int, int]) -> None:
    result = summed(mode, [Reply(tokens=7)], right=0)
    assert (result.large_tokens, result.small_tokens) == tokens
    assert result.handoff_ms_p50 is None


def test_one_token_replies_have_no_speed() -> None:
    assert summed(Mode.LARGE, [Reply(tokens=1)], right=0).ms_per_token == 0


def test_markdown_has_a_row_for_each_mode_and_the_ratios(found: Comparison) -> None:
    text = markdown(found)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows[2:]] == [
        "large alone", "small alone", "relay",
    ]  # fmt: skip
    assert len({row.count("|") for row in rows}) == 1
    assert "0.68 of the large model's alone, 1.10 of the ideal 1.30 s" in text


def test_the_summary_is_silent_on_handoffs_where_there_were_none(found: Comparison) -> None:
    assert not any("handoffs a reply" in line for line in summary(found))


def test_as_dict_has_the_ratios_and_every_mode(found: Comparison) -> None:
    data = found.as_dict()
    assert set(data["modes"]) == {"large", "small", "relay"}
    assert data["relay_to_ideal"] == pytest.approx(1.1)
