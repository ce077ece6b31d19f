"""Small traces and scores, and what the session itself makes of a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from relaygen.calibration.segments import Span
from relaygen.calibration.traces import Score, Scored, Trace
from relaygen.events import DecodeChunk, Piece, Role
from relaygen.policy import Policy
from relaygen.session import RelaySession
from relaygen.thinking import Phase

ENDS = (".", "!", "?", "\n\n")
TOKENS = (
    *("<think>", "</think>", "</", "think", ">", "\n", "\n\n", " ", ".", "!", '."', "…", "3", "14"),
    *("Now", " Now", "Now,", ",", " so", "So", " So", "know", "Thus", "There", "fore", "1", " it"),
    *(" is", "", "所以", "。", "ดัง", "นั้น"),
)
WORDS = ("Now", "Now,", "Therefore", "So", "so", "So it", "Thus", "所以", "ดังนั้น", "so so", "1")

tokens = st.lists(st.sampled_from(TOKENS), max_size=40)
cue_lists = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4, unique=True)


def make_trace(
    texts: Sequence[str], margins: Sequence[float | None] | None = None, name: str = "t"
) -> Trace:
    return Trace(
        id=name,
        question="?",
        prompt="?",
        prompt_ids=(1,),
        texts=tuple(texts),
        ids=tuple(range(len(texts))),
        margins=tuple(margins if margins is not None else [1.0] * len(texts)),
        finish="stop",
        first_s=0.1,
        total_s=1.0,
    )


def make_scored(
    texts: Sequence[str],
    margins: Sequence[float | None] | None = None,
    hits: Sequence[bool | None] | None = None,
    own: Sequence[float | None] | None = None,
    name: str = "t",
) -> Scored:
    """A trace whose tokens the scorer is sure of and hits, where nothing else is said."""
    count = len(texts)
    score = Score(
        id=name,
        scorer="small",
        margins=tuple(margins if margins is not None else [1.0] * count),
        hits=tuple(hits if hits is not None else [True] * count),
    )
    return Scored(make_trace(texts, own, name), score)


def session_roles(policy: Policy, texts: Sequence[str]) -> Iterator[tuple[Role, Span]]:
    """Who writes what, told token by token to the session of the gateway."""
    opened = "".join(texts).lstrip().startswith(policy.thinking.open)
    phase = Phase.UNDECIDED if opened else Phase.THINKING
    session = RelaySession(policy, phase=phase, move_blanks=False)
    start = 0
    while start < len(texts):
        session.next_decode()
        role, end = session.role, _decode(session, texts, start)
        yield role, Span(start, end)
        start = end


def _decode(session: RelaySession, texts: Sequence[str], start: int) -> int:
    """Index after the last token that one decode keeps."""
    for i in range(start, len(texts)):
        before = session.usage.completion_tokens
        session.receive(DecodeChunk((Piece(texts[i], (0,)),)))
        if not session.decoding:
            return i + (session.usage.completion_tokens > before)
    return len(texts)
