"""One generation by two models, sans-IO: decode events go in, deltas and decode requests come out.

The driver's loop: ask `next_decode()`, feed that decode's events to `receive()` until `decoding` is
false, close the stream, ask again; None means that the generation has ended. A decode that broke is
ended by `resume()`, or by DecodeFailed where nobody can go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, assert_never

from relaygen.cues import Cut
from relaygen.cutter import CONTEXT, Cutter
from relaygen.errors import LocalMisuseError
from relaygen.events import (
    DecodeChunk,
    DecodeFailed,
    DecodeFinished,
    DecodeRequest,
    Delegated,
    Delta,
    Event,
    Failed,
    Finished,
    Handoff,
    Output,
    Piece,
    Role,
)
from relaygen.kept import KeptText
from relaygen.limits import Limits
from relaygen.manuscript import Manuscript
from relaygen.policy import Policy
from relaygen.quiet import QuietRun, open_run
from relaygen.rules import Rules
from relaygen.state import State, Trigger, after
from relaygen.stops import StopMatcher
from relaygen.thinking import Phase, ThinkingSplitter
from relaygen.transcript import Transcript
from relaygen.usage import Usage

__all__ = ["Limits", "RelaySession"]

_NO_LIMITS = Limits()


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
        limits: Limits = _NO_LIMITS,
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
        self._closing = Piece("\n" + policy.thinking.close, close_ids, len(close_ids) or 1)
        self._delegate = delegate
        self._splitter = ThinkingSplitter(policy.thinking.open, policy.thinking.close, phase)
        self._rules = Rules(policy, limits, self._splitter, delegate=delegate)
        stops = StopMatcher(limits.stops, include=limits.include_stop)
        transcript = Transcript(self._splitter, stops, policy.stops)
        kept = KeptText(with_ids=handoff == "tokens", move_blanks=move_blanks)
        self._written = Manuscript(kept, transcript)
        self._cutter = Cutter(policy)
        self._outputs: list[Output] = []
        self._end: Callable[[Usage], Output] | None = None  # the last output
        self._received = 0  # tokens of the open decode
        self._guessed = False  # whether they are an estimate
        self._run: QuietRun | None = None
        self.holds: Callable[[], frozenset[Role]] = frozenset
        """Tells the roles that are not to be handed to for now; the driver's to set."""
        self.state = State.READY
        self.role = solo or Role.LARGE
        self.segment = 0
        self.decoding = False
        """Whether a decode is open and wants more events."""

    # ---- what a driver sees ---------------------------------------------------------------------

    @property
    def usage(self) -> Usage:
        return self._settle().ledger.usage()

    @property
    def handoff(self) -> Literal["tokens", "text"]:
        """The form in which the next prefix is sent."""
        return "tokens" if self._settle().kept.ids is not None else "text"

    @property
    def text(self) -> str:
        """Everything kept so far, tags and all."""
        return self._settle().kept.text()

    @property
    def left(self) -> Limits:
        """The limits of what is still to be written."""
        ledger = self._settle().ledger
        return self._limits.after(ledger.kept, self.segment + ledger.resumes)

    @property
    def stand_in(self) -> Role | None:
        """Who may go on where the engines of the role that writes now fail; None: nobody."""
        allowed = self._solo is None and self._policy.stands_in(self.role)
        return self.role.other if allowed else None

    def next_decode(self) -> DecodeRequest | None:
        """The decode to open now, or None when the generation has ended."""
        if self.decoding:
            raise LocalMisuseError("next_decode() while a decode is open")
        if self.state.ended:
            return None
        if self.state is State.READY:
            self._move(Trigger.SOLO if self._solo else Trigger.START)
        self.decoding, self._received, self._guessed = True, 0, False
        return self._request(self.role, self.segment)

    def foreseen(self) -> DecodeRequest | None:
        """The next decode, should what comes next end the segment before itself, as after "3."."""
        may = self.decoding and self.state is State.SMALL and self._cutter.waits
        if not may or Role.LARGE in self.holds() or self._spent:
            return None
        return self._request(Role.LARGE, self.segment + 1)

    def warm_up(self) -> DecodeRequest | None:
        """One token of the other role after all that is kept; None where it does not take over."""
        other = self.role.other
        taking_turns = self.decoding and self.state in (State.LARGE, State.SMALL)
        if not taking_turns or other in self.holds() or self._spent:
            return None
        return replace(self._request(other, self.segment), max_tokens=1, min_tokens=None)

    def _request(self, role: Role, segment: int) -> DecodeRequest:
        written = self._settle()
        ledger, prefix = written.ledger, written.kept.prefix()
        left = self._limits.after(ledger.kept, segment + ledger.resumes)
        return DecodeRequest(role, segment, prefix, left.max_tokens, left.min_tokens, left.seed)

    def receive(self, event: Event) -> list[Output]:
        """Take one event of the open decode; returns what it brings for the client.

        Raises LocalMisuseError when no decode is open. Nothing that an engine sends raises.
        """
        if not self.decoding:
            raise LocalMisuseError("receive() while no decode is open")
        match event:
            case DecodeChunk():
                self._guessed |= event.estimated
                return self._chunk(event.pieces)
            case DecodeFinished():
                self._settle()
                self._decode_finished(event)
            case DecodeFailed():
                self._settle()
                self._fail(event.message)
            case _:
                assert_never(event)
        return self._taken()

    def resume(self, role: Role | None = None, *, ids: bool = True) -> list[Output]:
        """The open decode broke: `next_decode()` goes on from what is kept.

        By the other `role` where it is the `stand_in`; without `ids` from text, for good. Returns
        what it brings for the client. Raises LocalMisuseError when no decode is open.
        """
        if not self.decoding:
            raise LocalMisuseError("resume() while no decode is open")
        written = self._settle()
        written.ledger.resumes += 1
        written.discard_lagging()
        if self._spent:
            self._finish(Trigger.LIMIT, "length")
            return self._taken()
        if (texts := written.put_back_blank(self.role)) is not None:
            self._cutter.again(texts)
        if not ids:
            written.kept.forget_ids()
        if role in (None, self.role):
            self.decoding = False
            self._account()
            self._move(Trigger.RESUME)
        else:
            self._hand_over(Trigger.FALLBACK, "")
        return self._taken()

    def cancel(self) -> None:
        """The client left: no more decodes, no more outputs."""
        if not self.state.ended:
            self._move(Trigger.CANCEL)
            self.decoding = False
            self._settle().discard_lagging()

    def _taken(self) -> list[Output]:
        self._outputs[:0] = self._written.take()
        if self._end is not None:  # with what was discarded after it
            self._outputs.append(self._end(self.usage))
        outputs, self._outputs, self._end = self._outputs, [], None
        return outputs

    # ---- tokens ---------------------------------------------------------------------------------

    def _chunk(self, pieces: tuple[Piece, ...]) -> list[Output]:
        delta = self._quiet(pieces)
        if delta is not None and len(delta.pieces) == len(pieces):
            return [delta]
        while pieces and self.decoding:
            self._settle()
            if delta is not None:
                self._written.pass_on(delta)
                pieces = pieces[len(delta.pieces) :]
            else:
                self._single(pieces[0])
                pieces = pieces[1:]
            delta = self._quiet(pieces) if self.decoding else None
        self._settle()
        self._written.discard(pieces)
        return self._taken()

    def _quiet(self, pieces: tuple[Piece, ...]) -> Delta | None:
        """Takes the first pieces where nothing happens in them."""
        run = self._run
        if run is None:
            where = (self.state, self._writing)
            run = open_run(self._written, self._cutter, self._rules, *where, guessed=self._guessed)
            self._run = run
        return run.take(pieces) if run is not None else None

    def _single(self, piece: Piece) -> None:
        written = self._written
        kept = written.ledger.kept + written.lagging
        if self._rules.overrun(kept, piece, guessed=self._guessed):
            written.discard([*written.take_lagging(), piece])
            self._finish(Trigger.LIMIT, "length")
            return
        self._received += piece.tokens
        if piece.text:
            self._piece(piece)
        else:
            written.lag(piece)

    @property
    def _writing(self) -> tuple[Role, int]:
        return self.role, self.segment

    def _settle(self) -> Manuscript:
        """The open run ends, and what it took is kept."""
        if (run := self._run) is not None:
            self._run = None
            self._received += run.count
            run.settle(self._written, self._cutter, self.state)
        return self._written

    def _piece(self, piece: Piece) -> None:
        cut = self._find_cut(piece.text)
        pieces = [*self._written.take_lagging(), piece]
        if cut and cut.keep == 0:
            self._written.discard(pieces)
            self._hand_over(Trigger.BOUNDARY, cut.text)
            return
        text = piece.text[: cut.keep] if cut else piece.text
        if self._delegate and (end := self._splitter.closes_at(text)) is not None:
            text = text[:end]
        self._written.keep(self._writing, pieces, text)
        self._advance(cut, whole=text == piece.text)

    def _find_cut(self, text: str) -> Cut | None:
        before = self._written.segment_tokens + self._written.lagging
        armed = self._rules.armed(self.state, before, self.role.other, self.holds())
        return self._cutter.push(self.state, text, armed=armed)

    # ---- what follows from a kept token ---------------------------------------------------------

    def _advance(self, cut: Cut | None, *, whole: bool) -> None:
        if self._written.stop is not None:
            self._finish(Trigger.STOP, "stop")
        elif self.state is State.ANSWER:
            return
        elif self._splitter.phase is Phase.ANSWER and (self._delegate or not self._rules.relaying):
            self._answer(whole=whole)
        elif cut:
            trigger = Trigger.CUE if self.state is State.LARGE else Trigger.BOUNDARY
            self._hand_over(trigger, cut.text)
        elif self._rules.full(self.state, self._written.segment_tokens, self.holds()):
            self._hand_over(Trigger.BOUNDARY, "")

    def _answer(self, *, whole: bool) -> None:
        if self._delegate:
            self._delegated()
        elif not self._splitter.thought:
            self._move(Trigger.PLAIN)
        elif self.role is self._rules.answerer(self.holds()) and whole:
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
            self._written.withdraw()
            text = ""
        self._end = partial(Delegated, text)

    def _hand_over(self, trigger: Trigger, text: str) -> None:
        self.decoding = False
        self._account()
        if self._spent:
            self._finish(Trigger.LIMIT, "length")
            return
        self._written.put_back_blank(self.role)
        self._move(trigger)
        target = self._rules.writer(self.state, self.role, trigger, self.holds())
        if target is not self.role:
            self._written.ledger.handoffs += 1
            self._written.begin_segment()
            self.segment += 1
            self._outputs.append(Handoff(self.role, target, trigger, text, self.segment))
            self.role = target
        self._cutter.begin(self._written.handed_over(CONTEXT))

    @property
    def _spent(self) -> bool:
        return self._limits.spent(self._written.ledger.kept)

    # ---- how a decode ends ----------------------------------------------------------------------

    def _decode_finished(self, event: DecodeFinished) -> None:
        self.decoding = False
        large, written = self.role is Role.LARGE, self._written
        ending = written.ended(event.tokens, self._received, large=large, guessed=self._guessed)
        self._guessed = self._guessed and event.tokens is None
        if event.reason == "stop" and self._goes_on(ending):
            return
        written.ledger.keep(ending, large=large)
        trigger = Trigger.LIMIT if event.reason == "length" else Trigger.FINISH
        self._finish(trigger, event.reason)

    def _goes_on(self, ending: int) -> bool:
        """Whether the generation outlives the model's end of turn; if so, hands over."""
        empty = self._solo is None and self._written.decode_tokens == 0
        trigger = self._rules.outlives(self.state, self.role, self.holds(), empty=empty)
        if trigger is None:
            return False
        self._written.ledger.discarded += ending
        if trigger is Trigger.UNCLOSED:
            self._written.add(self._writing, self._closing)
            if self._delegate:
                self._delegated()
                return True
        self._hand_over(trigger, "")
        return True

    def _finish(self, trigger: Trigger, reason: str) -> None:
        self.decoding = False
        self._account()
        self._written.let_go(self._writing)
        if self._written.stop is not None:  # it may end in the blank just let go
            trigger, reason = Trigger.STOP, "stop"
        self._move(trigger)
        self._end = partial(Finished, reason, stop=self._written.stop)

    def _fail(self, message: str) -> None:
        self.decoding = False
        self._account()
        self._move(Trigger.ERROR)
        self._written.discard_lagging()
        self._written.let_go(self._writing)
        self._end = partial(Failed, message)

    def _account(self) -> None:
        self._written.ledger.estimated |= self._guessed

    def _move(self, trigger: Trigger) -> None:
        self.state = after(self.state, trigger)
