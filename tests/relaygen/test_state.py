"""The states of a generation and the table of what leads where."""

from __future__ import annotations

import pytest

from relaygen.errors import LocalMisuseError
from relaygen.state import TRANSITIONS, State, Trigger, after, diagram


def test_nothing_leads_out_of_an_end() -> None:
    assert not [state for state, _ in TRANSITIONS if state.ended]


def test_nothing_leads_back_to_the_start() -> None:
    assert State.READY not in TRANSITIONS.values()


def test_every_state_is_reached() -> None:
    assert {State.READY, *TRANSITIONS.values()} == set(State)


def test_every_state_before_the_end_may_be_cancelled_and_with_a_decode_it_may_fail() -> None:
    for state in (state for state in State if not state.ended):
        assert after(state, Trigger.CANCEL) is State.CANCELLED
        if state is not State.READY:
            assert after(state, Trigger.ERROR) is State.FAILED


def test_the_answer_is_never_left_for_another_segment() -> None:
    targets = {target for (state, _), target in TRANSITIONS.items() if state is State.ANSWER}
    assert targets == {State.ANSWER, State.DONE, State.FAILED, State.CANCELLED}


def test_a_step_that_the_table_lacks_is_refused() -> None:
    with pytest.raises(LocalMisuseError, match="no transition from state done on cue"):
        after(State.DONE, Trigger.CUE)


def test_the_table_can_not_be_changed() -> None:
    with pytest.raises(TypeError):
        TRANSITIONS[State.DONE, Trigger.CUE] = State.SMALL  # type: ignore[index]


def test_the_diagram_shows_every_row_of_the_table() -> None:
    lines = diagram().splitlines()
    for (source, trigger), target in TRANSITIONS.items():
        [edge] = [line for line in lines if line.startswith(f"    {source} --> {target}:")]
        assert trigger.value in edge


def test_the_diagram_begins_at_ready_and_ends_at_every_end() -> None:
    lines = diagram().splitlines()
    assert lines[:2] == ["stateDiagram-v2", "    [*] --> ready"]
    assert lines[-3:] == [f"    {end} --> [*]" for end in ("done", "failed", "cancelled")]
