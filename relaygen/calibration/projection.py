"""What a list of cues will bring: the recorded traces, written by both models as if online."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from relaygen.calibration.segments import Segmenter, Span, closed, thought
from relaygen.calibration.selection import succeeds
from relaygen.calibration.traces import Scored, Trace
from relaygen.events import Role
from relaygen.policy import Policy


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measured while tracing: milliseconds a token by role, and a handoff's."""

    large_ms: float
    small_ms: float
    handoff_ms: float = 0.0


@dataclass(slots=True)
class Replayed:
    """Sums over replayed traces.

    `segments` are those handed over inside the thinking; `clean` are traces in which none of them
    goes wrong. The answer counts as tokens alone.
    """

    traces: int = 0
    large: int = 0
    small: int = 0
    handoffs: int = 0
    segments: int = 0
    clean: int = 0

    @property
    def large_share(self) -> float:
        tokens = self.large + self.small
        return self.large / tokens if tokens else 1.0

    @property
    def quality(self) -> float:
        """Share of traces without a wrong segment, 0..1."""
        return self.clean / self.traces if self.traces else 1.0

    def speed_up(self, speeds: Speeds) -> float:
        """Wall time of the large model alone over that of the relay."""
        alone = (self.large + self.small) * speeds.large_ms
        relay = (
            self.large * speeds.large_ms
            + self.small * speeds.small_ms
            + self.handoffs * speeds.handoff_ms
        )
        return alone / relay if relay else 1.0

    def break_even_ms(self, speeds: Speeds) -> float | None:
        """The cost of a handoff at which relaying gains nothing; None without handoffs."""
        if not self.handoffs:
            return None
        return self.small * (speeds.large_ms - speeds.small_ms) / self.handoffs


def replayed(policy: Policy, scored: Iterable[Scored], sure: float) -> Replayed:
    """The sums of one policy; see replayed_all."""
    return replayed_all([policy], scored, sure)[0]


def replayed_all(
    policies: Sequence[Policy], scored: Iterable[Scored], sure: float
) -> list[Replayed]:
    """The sums of each policy. The traces are read once, whatever the number of policies."""
    players = [(_Player(policy), Replayed()) for policy in policies]
    for one in scored:
        for player, sums in players:
            _add(sums, player, one, sure)
    return [sums for _, sums in players]


def _add(sums: Replayed, player: _Player, scored: Scored, sure: float) -> None:
    sums.traces += 1
    clean, last = True, None
    thinking_ends = thought(scored.trace.texts, player.policy.thinking).end
    for role, span in player.roles(scored.trace):
        tokens = span.end - span.start
        if role is Role.LARGE:
            sums.large += tokens
        else:
            sums.small += tokens
            if span.start < thinking_ends:
                sums.segments += 1
                inside = Span(span.start, min(span.end, thinking_ends))
                clean = clean and succeeds(scored, inside, sure) is not False
        sums.handoffs += last is not None and last is not role
        last = role
    sums.clean += clean


def roles(policy: Policy, trace: Trace) -> Iterator[tuple[Role, Span]]:
    """Who would have written which tokens, as the session decides it online.

    A token is the role's that keeps it or a part of it (`match: substring` cuts inside tokens; what
    is cut off is not read again).
    """
    return _Player(policy).roles(trace)


class _Player:
    """Plays one trace after the other by a policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        boundaries, longest = policy.boundary_set, policy.max_small_tokens
        self._segmenter = Segmenter((policy.cue_set,), boundaries, longest)

    def roles(self, trace: Trace) -> Iterator[tuple[Role, Span]]:
        policy, segmenter, texts = self.policy, self._segmenter, trace.texts
        segmenter.read(texts)
        span = thought(texts, policy.thinking)
        end = closed(texts, policy.thinking)
        role, start = Role.LARGE, 0
        while start < end:
            if role is Role.LARGE:
                armed = max(start + policy.min_large_tokens, span.start)
                cut = segmenter.cue_end(start, end, armed)
            else:
                cut = segmenter.segment_end(start, end)
            if cut == end < len(texts) and role is policy.answer:  # it simply goes on
                cut = len(texts)
            yield role, Span(start, cut)
            role, start = role.other, cut
        if start < len(texts):
            yield policy.answer, Span(start, len(texts))
