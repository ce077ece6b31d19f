"""The states of one generation and the one table of what leads from where to where."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from relaygen.errors import LocalMisuseError


class State(StrEnum):
    READY = "ready"
    LARGE = "large"
    SMALL = "small"
    ANSWER = "answer"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in _ENDED


_ENDED = frozenset({State.DONE, State.FAILED, State.CANCELLED})


class Trigger(StrEnum):
    """Why the state changes."""

    START = "start"
    SOLO = "solo"
    """One role writes all: the client asked so, or the template switched thinking off."""
    CUE = "cue"
    BOUNDARY = "boundary"
    """A sentence end, the small model's end of turn, or `max_small_tokens`."""
    THINK_END = "think_end"
    UNCLOSED = "unclosed"
    """The model ended its turn inside the thinking, and the other has nothing to add to it."""
    DELEGATE = "delegate"
    """The thinking is over, and what follows is not the session's to write."""
    PLAIN = "plain"
    """The model answers without thinking."""
    EMPTY = "empty"
    """The answer's model brought no token."""
    RESUME = "resume"
    """The decode broke; the same role goes on from what is kept."""
    FALLBACK = "fallback"
    """The decode broke; the other role goes on from what is kept."""
    FINISH = "finish"
    LIMIT = "limit"
    STOP = "stop"
    ERROR = "error"
    CANCEL = "cancel"


def _table() -> dict[tuple[State, Trigger], State]:
    table = {
        (State.READY, Trigger.START): State.LARGE,
        (State.READY, Trigger.SOLO): State.ANSWER,
        (State.LARGE, Trigger.CUE): State.SMALL,
        (State.SMALL, Trigger.BOUNDARY): State.LARGE,
        (State.LARGE, Trigger.THINK_END): State.ANSWER,
        (State.SMALL, Trigger.THINK_END): State.ANSWER,
        (State.LARGE, Trigger.FALLBACK): State.SMALL,
        (State.SMALL, Trigger.FALLBACK): State.LARGE,
        (State.ANSWER, Trigger.FALLBACK): State.ANSWER,
        (State.LARGE, Trigger.UNCLOSED): State.ANSWER,
        (State.SMALL, Trigger.UNCLOSED): State.ANSWER,
        (State.LARGE, Trigger.PLAIN): State.ANSWER,
        (State.ANSWER, Trigger.EMPTY): State.ANSWER,
        (State.LARGE, Trigger.DELEGATE): State.DONE,
        (State.SMALL, Trigger.DELEGATE): State.DONE,
    }
    for state in (State.LARGE, State.SMALL, State.ANSWER):
        table[state, Trigger.RESUME] = state
        table[state, Trigger.FINISH] = State.DONE
        table[state, Trigger.LIMIT] = State.DONE
        table[state, Trigger.STOP] = State.DONE
        table[state, Trigger.ERROR] = State.FAILED
        table[state, Trigger.CANCEL] = State.CANCELLED
    table[State.READY, Trigger.CANCEL] = State.CANCELLED
    return table


TRANSITIONS: Mapping[tuple[State, Trigger], State] = MappingProxyType(_table())


def after(state: State, trigger: Trigger) -> State:
    """The state that `trigger` leads to; LocalMisuseError where the table has none."""
    try:
        return TRANSITIONS[state, trigger]
    except KeyError:
        raise LocalMisuseError(f"no transition from state {state} on {trigger}") from None


def diagram() -> str:
    """The table as a Mermaid state diagram, for docs/architecture.md."""
    lines = ["stateDiagram-v2", "    [*] --> ready"]
    edges: dict[tuple[State, State], list[str]] = {}
    for (source, trigger), target in TRANSITIONS.items():
        edges.setdefault((source, target), []).append(trigger.value)
    for (source, target), triggers in edges.items():
        lines.append(f"    {source} --> {target}: {', '.join(triggers)}")
    lines += [f"    {state} --> [*]" for state in State if state.ended]
    return "\n".join(lines) + "\n"
