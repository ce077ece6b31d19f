"""What a list of cues will bring: the recorded traces, written by both models as if online."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from relaygen.calibration.segments import Segmenter, Span, closed, thought
from relaygen.calibration.selection import succeeds
from relaygen.calibration.traces import Scored, Trace
from relaygen.cues import CueSet
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
    """The sums with the policy's own cues."""
    return replayed_all(policy, [policy.cues.words], scored, sure)[0]


def replayed_all(
    policy: Policy, lists: Sequence[Sequence[str]], scored: Iterable[Scored], sure: float
) -> list[Replayed]:
    """The sums with each of these lists of cues in the policy. The traces are read once."""
    player = _Player(policy, lists)
    sums = [Replayed() for _ in lists]
    for one in scored:
        player.read(one.trace)
        for number, its_sums in enumerate(sums):
            _add(its_sums, player, number, one, sure)
    return sums


def _add(sums: Replayed, player: _Player, number: int, scored: Scored, sure: float) -> None:
    sums.traces += 1
    clean, last, inside = True, None, player.inside
    for role, span in player.roles(number):
        tokens = span.end - span.start
        if role is Role.LARGE:
            sums.large += tokens
        else:
            sums.small += tokens
            if span.start < inside.end:
                sums.segments += 1
                segment = Span(span.start, min(span.end, inside.end))
                clean = clean and succeeds(scored, segment, sure) is not False
        sums.handoffs += last is not None and last is not role
        last = role
    sums.clean += clean


def roles(policy: Policy, trace: Trace) -> Iterator[tuple[Role, Span]]:
    """Who would have written which tokens, as the session decides it online.

    A token is the role's that keeps it or a part of it (`match: substring` cuts inside tokens; what
    is cut off is not read again). A blank that a text handoff leaves to the next engine is still
    the role's that wrote it first.
    """
    player = _Player(policy, [policy.cues.words])
    player.read(trace)
    return player.roles(0)


class _Player:
    """Plays one trace after the other by a policy, with several lists of cues."""

    def __init__(self, policy: Policy, lists: Sequence[Sequence[str]]) -> None:
        self._policy = policy
        cues = [CueSet(words, policy.cues.match) for words in lists]
        self._segmenter = Segmenter(cues, policy.boundary_set, policy.max_small_tokens)

    def read(self, trace: Trace) -> None:
        """Go on with this trace."""
        self._segmenter.read(trace.texts)
        self._count = len(trace.texts)
        self.inside = thought(trace.texts, self._policy.thinking)
        self._closed = closed(trace.texts, self._policy.thinking)

    def roles(self, number: int) -> Iterator[tuple[Role, Span]]:
        """Who would have written what with that list."""
        role, start, answer = Role.LARGE, 0, self._policy.answer
        while start < self._closed:
            end = self._segment_end(number, role, start)
            if end == self._closed and role is answer:  # it simply goes on
                end = self._count
            yield role, Span(start, end)
            role, start = role.other, end
        if start < self._count:
            yield answer, Span(start, self._count)

    def _segment_end(self, number: int, role: Role, start: int) -> int:
        if role is Role.SMALL:
            return self._segmenter.segment_end(start, self._closed)
        armed = max(start + self._policy.min_large_tokens, self.inside.start)
        return self._segmenter.cue_end(number, start, self._closed, armed)
