"""Runs the session over saved text: which segments would each model have written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from relaygen.events import DecodeChunk, Handoff, Piece, Role
from relaygen.policy import Policy
from relaygen.session import RelaySession
from relaygen.thinking import Phase

# Saved text has lost its tokens. Words with the blank before them, single digits, runs of other
# marks and runs of line ends come near to what byte-level BPE makes of prose.
_TOKEN = re.compile(r" ?[^\W\d_]+|\d|\n+|[^\S\n]+(?!\S)|[^\S\n]+|_+|</?\w+>| ?[^\w\s]+")


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment of the replayed text; `trigger` is the text that ended it, None at the end."""

    role: Role
    text: str
    trigger: str | None


def replay(policy: Policy, text: str) -> Iterator[Segment]:
    """The segments of `text`; joined, they are `text`.

    Text with no opening tag is taken for reasoning, as if the prompt had opened it.
    """
    opened = text.lstrip().startswith(policy.thinking.open)
    phase = Phase.UNDECIDED if opened else Phase.THINKING
    session = RelaySession(policy, phase=phase, move_blanks=False)
    start, role = 0, Role.LARGE
    while not session.decoding:  # it stays open where the text is used up
        session.next_decode()
        for handoff in _decode(session, text, len(session.text)):
            end = len(session.text)
            yield Segment(role, text[start:end], handoff.text or handoff.trigger.value)
            start, role = end, handoff.target
    if start < len(text):
        yield Segment(role, text[start:], None)


def _decode(session: RelaySession, text: str, position: int) -> Iterator[Handoff]:
    """Plays one decode: the saved text from `position` on, token by token."""
    for token in _TOKEN.finditer(text, position):
        for output in session.receive(DecodeChunk((Piece(token.group(), (0,)),))):
            if isinstance(output, Handoff):
                yield output
        if not session.decoding:
            return
