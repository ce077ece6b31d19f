"""One generation by two models, sans-IO: decode events go in, deltas and decode requests come out.

The driver's loop: ask `next_decode()`, feed that decode's events to `receive()` until `decoding` is
false, close the stream, ask again; None means that the generation has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, assert_never

from relaygen.boundaries import BoundaryMatcher
from relaygen.cues import CueMatcher, Cut
from relaygen.errors import LocalMisuseError
from relaygen.events import (
    DecodeChunk,
    DecodeFailed,
    DecodeFinished,
    DecodeRequest,
    Delegated,
    Event,
    Failed,
    Finished,
    Handoff,
    Output,
    Piece,
    Role,
)
from relaygen.kept import KeptText
from relaygen.policy import Policy
from relaygen.state import State, Trigger, after
from relaygen.stops import StopMatcher
from relaygen.thinking import Phase, ThinkingSplitter
from relaygen.transcript import Transcript
from relaygen.usage import Ledger, Usage

_CONTEXT = 16  # characters before a segment that its matchers see


@dataclass(frozen=True, slots=True)
class Limits:
    """What the client asked of the whole generation. Token counts; None means not asked."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stops: tuple[str, ...] = ()
    include_stop: bool = False


class RelaySession:
    """State of one generation.

    `handoff` is the form of the prefix at the start; it becomes "text" for good when a kept token's
    id is unknown. `phase` says where the rendered prompt leaves the model: before, inside or after
    its thinking. `solo` lets one role write everything. `close_ids` are the token ids of
    "\\n" + the closing tag, for a model that ends its turn inside the thinking. Without
    `move_blanks` a text prefix may end in a blank, as the reference's does. With `delegate` the
    session ends with the thinking: what follows is another's to write.
    """

    def __init__(
        self,
        policy: Policy,
        limits: Limits = Limits(),
        *,
        handoff: Literal["tokens", "text"] = "tokens",
        phase: Phase = Phase.UNDECIDED,
        solo: Role | None = None,
        close_ids: tuple[int, ...] = (),
        move_blanks: bool = True,
        delegate: bool = False,
    ) -> None:
        if solo is None and phase is Phase.ANSWER and policy.plain == "large":
            solo = Role.LARGE
        self._policy = policy
        self._limits = limits
        self._solo = solo
        self._close_ids = close_ids
        self._delegate = delegate
        self._splitter = ThinkingSplitter(policy.thinking.open, policy.thinking.close, phase)
        stops = StopMatcher(limits.stops, include=limits.include_stop)
        self._transcript = Transcript(self._splitter, stops, policy.stops)
        self._kept = KeptText(with_ids=handoff == "tokens", move_blanks=move_blanks)
        self._ledger = Ledger()
        self._cues = CueMatcher(policy.cue_set)
        self._boundaries = BoundaryMatcher(policy.boundary_set)
        self._outputs: list[Output] = []
        self._end: Callable[[Usage], Output] | None = None  # the last output
        self._lagging: list[Piece] = []  # tokens whose text has not come yet
        self._received = 0  # tokens of the open decode
        self._guessed = False  # whether they are an estimate
        self._kept_here = 0  # tokens kept of the open decode
        self._segment_tokens = 0
        self.state = State.READY
        self.role = solo or Role.LARGE
        self.segment = 0
        self.decoding = False
        """Whether a decode is open and wants more events."""

    # ---- what a driver sees ---------------------------------------------------------------------

    @property
    def usage(self) -> Usage:
        return self._ledger.usage()

    @property
    def handoff(self) -> Literal["tokens", "text"]:
        """The form in which the next prefix is sent."""
        return "tokens" if self._kept.ids is not None else "text"

    @property
    def text(self) -> str:
        """Everything kept so far, tags and all."""
        return self._kept.text()

    @property
    def left(self) -> Limits:
        """The limits of what is still to be written."""
        limits, kept = self._limits, self._ledger.kept
        return replace(
            limits,
            max_tokens=None if limits.max_tokens is None else limits.max_tokens - kept,
            min_tokens=None if limits.min_tokens is None else max(0, limits.min_tokens - kept),
            seed=None if limits.seed is None else limits.seed + self.segment,
        )

    def next_decode(self) -> DecodeRequest | None:
        """The decode to open now, or None when the generation has ended."""
        if self.decoding:
            raise LocalMisuseError("next_decode() while a decode is open")
        if self.state.ended:
            return None
        if self.state is State.READY:
            self._move(Trigger.SOLO if self._solo else Trigger.START)
        self.decoding = True
        self._received = self._kept_here = 0
        self._guessed = False
        left = self.left
        return DecodeRequest(
            role=self.role,
            segment=self.segment,
            prefix=self._kept.prefix(),
            max_tokens=left.max_tokens,
            min_tokens=left.min_tokens,
            seed=left.seed,
        )

    def receive(self, event: Event) -> list[Output]:
        """Take one event of the open decode; returns what it brings for the client.

        Raises LocalMisuseError when no decode is open. Nothing that an engine sends raises.
        """
        if not self.decoding:
            raise LocalMisuseError("receive() while no decode is open")
        match event:
            case DecodeChunk():
                self._guessed |= event.estimated
                self._chunk(event.pieces)
            case DecodeFinished():
                self._decode_finished(event)
            case DecodeFailed():
                self._fail(event.message)
            case _:
                assert_never(event)
        self._outputs[:0] = self._transcript.take()
        if self._end is not None:  # with what was discarded after it
            self._outputs.append(self._end(self.usage))
        outputs, self._outputs, self._end = self._outputs, [], None
        return outputs

    def cancel(self) -> None:
        """The client left: no more decodes, no more outputs."""
        if not self.state.ended:
            self._move(Trigger.CANCEL)
            self.decoding = False
            self._discard(self._take_lagging())

    # ---- tokens ---------------------------------------------------------------------------------

    def _chunk(self, pieces: tuple[Piece, ...]) -> None:
        for piece in pieces:
            if not self.decoding:
                self._discard([piece])
            elif not piece.text:
                self._received += piece.tokens
                self._lagging.append(piece)
            else:
                self._received += piece.tokens
                self._piece(piece)

    def _piece(self, piece: Piece) -> None:
        cut = self._find_cut(piece.text)
        pieces = [*self._take_lagging(), piece]
        if cut and cut.keep == 0:
            self._discard(pieces)
            self._hand_over(Trigger.BOUNDARY, cut.text)
            return
        text = piece.text[: cut.keep] if cut else piece.text
        if self._delegate and (end := self._splitter.closes_at(text)) is not None:
            text = text[:end]
        self._keep(pieces, text)
        self._advance(cut, whole=text == piece.text)

    def _find_cut(self, text: str) -> Cut | None:
        if self.state is State.LARGE:
            before = self._segment_tokens + _tokens(self._lagging)
            ripe = before >= self._policy.min_large_tokens
            return self._cues.push(text, armed=ripe and self._relaying)
        if self.state is State.SMALL:
            return self._boundaries.push(text)
        return None

    @property
    def _relaying(self) -> bool:
        phase = self._splitter.phase
        if phase is Phase.ANSWER:
            return self._policy.plain == "relay" and not self._splitter.thought
        return phase is Phase.THINKING

    def _keep(self, pieces: list[Piece], text: str) -> None:
        count = _tokens(pieces)
        self._ledger.keep(count, large=self.role is Role.LARGE)
        self._segment_tokens += count
        self._kept_here += count
        self._transcript.push(self.role, self.segment, self._kept.add(pieces, text), pieces)

    def _discard(self, pieces: Iterable[Piece]) -> None:
        self._ledger.discarded += _tokens(pieces)

    def _take_lagging(self) -> list[Piece]:
        lagging, self._lagging = self._lagging, []
        return lagging

    # ---- what follows from a kept token ---------------------------------------------------------

    def _advance(self, cut: Cut | None, *, whole: bool) -> None:
        if self._transcript.stop is not None:
            self._finish(Trigger.STOP, "stop")
        elif self.state is State.ANSWER:
            return
        elif self._splitter.phase is Phase.ANSWER and (self._delegate or not self._relaying):
            self._answer(whole=whole)
        elif cut:
            self._hand_over(
                Trigger.CUE if self.state is State.LARGE else Trigger.BOUNDARY, cut.text
            )
        elif self.state is State.SMALL and self._segment_tokens >= self._policy.max_small_tokens:
            self._hand_over(Trigger.BOUNDARY, "")

    def _answer(self, *, whole: bool) -> None:
        if self._delegate:
            self._delegated()
        elif not self._splitter.thought:
            self._move(Trigger.PLAIN)
        elif self.role is self._policy.answer and whole:
            self._move(Trigger.THINK_END)  # its stream simply goes on
        else:
            self._hand_over(Trigger.THINK_END, self._policy.thinking.close)

    def _delegated(self) -> None:
        self.decoding = False
        if self._splitter.thought and self._spent:
            self._finish(Trigger.LIMIT, "length")
            return
        self._account()
        self._move(Trigger.DELEGATE)
        text = self.text
        if not self._splitter.thought:
            self._transcript.withdraw()
            self._ledger.withdraw()
            text = ""
        self._end = partial(Delegated, text)

    def _hand_over(self, trigger: Trigger, text: str) -> None:
        self.decoding = False
        self._account()
        if self._spent:
            self._finish(Trigger.LIMIT, "length")
            return
        self._kept.drop_blank()
        self._move(trigger)
        target = self._writer(trigger)
        if target is not self.role:
            self._ledger.handoffs += 1
            self.segment += 1
            self._segment_tokens = 0
            self._outputs.append(Handoff(self.role, target, trigger, text, self.segment))
            self.role = target
        before = self._kept.tail(_CONTEXT)
        self._cues.reset(before)
        self._boundaries.reset(before)

    def _writer(self, trigger: Trigger) -> Role:
        if trigger is Trigger.EMPTY:
            return self.role.other
        if self.state is State.ANSWER:
            return self._policy.answer
        return Role.SMALL if self.state is State.SMALL else Role.LARGE

    @property
    def _spent(self) -> bool:
        limit = self._limits.max_tokens
        return limit is not None and self._ledger.kept >= limit

    # ---- how a decode ends ----------------------------------------------------------------------

    def _decode_finished(self, event: DecodeFinished) -> None:
        self.decoding = False
        unseen = max(0, event.tokens - self._received) if event.tokens is not None else 0
        ending = unseen + _tokens(self._take_lagging())
        if self._guessed and event.tokens is not None:  # now it is told how many they were
            self._ledger.keep(event.tokens - self._received, large=self.role is Role.LARGE)
            self._guessed, ending = False, 0
        if event.reason == "stop" and self._goes_on(ending):
            return
        self._ledger.keep(ending, large=self.role is Role.LARGE)
        if event.reason == "length":
            self._finish(Trigger.LIMIT, "length")
        else:
            self._finish(Trigger.FINISH, event.reason)

    def _goes_on(self, ending: int) -> bool:
        """Whether the generation outlives the model's end of turn; if so, hands over."""
        if self.state is State.SMALL:
            trigger = Trigger.BOUNDARY
        elif self.state is State.LARGE and self._splitter.phase is Phase.THINKING:
            self._close_thinking()
            if self._delegate:
                self._ledger.discarded += ending
                self._delegated()
                return True
            trigger = Trigger.UNCLOSED
        elif self.state is State.ANSWER and self._answer_is_missing():
            trigger = Trigger.EMPTY
        else:
            return False
        self._ledger.discarded += ending
        self._hand_over(trigger, "")
        return True

    def _answer_is_missing(self) -> bool:
        return self._solo is None and self.role is Role.SMALL and self._kept_here == 0

    def _close_thinking(self) -> None:
        text = "\n" + self._policy.thinking.close
        closing = Piece(text, self._close_ids, len(self._close_ids))
        if not self._close_ids:
            closing = Piece(text)
        self._transcript.push(self.role, self.segment, self._kept.add([closing], text))

    def _finish(self, trigger: Trigger, reason: str) -> None:
        self.decoding = False
        self._account()
        self._let_go()
        if self._transcript.stop is not None:  # it may end in the blank just let go
            trigger, reason = Trigger.STOP, "stop"
        self._move(trigger)
        self._end = partial(Finished, reason, stop=self._transcript.stop)

    def _fail(self, message: str) -> None:
        self.decoding = False
        self._account()
        self._move(Trigger.ERROR)
        self._discard(self._take_lagging())
        self._let_go()
        self._end = partial(Failed, message)

    def _let_go(self) -> None:
        self._transcript.push(self.role, self.segment, self._kept.release_blank())
        self._transcript.flush()

    def _account(self) -> None:
        self._ledger.estimated |= self._guessed

    def _move(self, trigger: Trigger) -> None:
        self.state = after(self.state, trigger)


def _tokens(pieces: Iterable[Piece]) -> int:
    return sum(piece.tokens for piece in pieces)
