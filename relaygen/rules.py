"""What policy and limits say of the generation as it stands."""

from __future__ import annotations

import sys

from relaygen.events import Piece, Role
from relaygen.limits import Limits
from relaygen.policy import Policy
from relaygen.state import State, Trigger
from relaygen.thinking import Phase, ThinkingSplitter


class Rules:
    """One session's. `held` are roles that are not to be handed to for now."""

    __slots__ = ("_delegate", "_limits", "_policy", "_splitter")

    def __init__(
        self, policy: Policy, limits: Limits, splitter: ThinkingSplitter, *, delegate: bool
    ) -> None:
        self._policy = policy
        self._limits = limits
        self._splitter = splitter
        self._delegate = delegate

    @property
    def relaying(self) -> bool:
        """Whether the text is of a kind in which the roles take turns."""
        phase = self._splitter.phase
        if phase is Phase.ANSWER:
            return self._policy.plain == "relay" and not self._splitter.thought
        return phase is Phase.THINKING

    def goes_by_itself(self, state: State) -> bool:
        """Whether a token that ends nothing leaves everything as it is."""
        answers = self._splitter.phase is Phase.ANSWER
        return state is State.ANSWER or (self.relaying and not (answers and self._delegate))

    def room(self, state: State, kept: int, segment: int, *, guessed: bool) -> int:
        """How many tokens may come before a limit is reached, after so many in all and so many in
        the segment."""
        room, limit = sys.maxsize, self._limits.max_tokens
        if limit is not None and not guessed:
            room = limit - kept
        if state is State.SMALL:
            room = min(room, self._policy.max_small_tokens - segment - 1)
        return room

    def overrun(self, kept: int, piece: Piece, *, guessed: bool) -> bool:
        """Whether the engine goes on after the last token that it was asked for."""
        end_of_turn = not piece.text  # it may follow the last token
        return not guessed and self._limits.spent(kept - end_of_turn)

    def armed(self, state: State, segment: int, other: Role, held: frozenset[Role]) -> bool:
        """Whether what ends a segment may hand over to the other role, after so many tokens."""
        if state is State.LARGE and (segment < self._policy.min_large_tokens or not self.relaying):
            return False
        return other not in held

    def full(self, state: State, segment: int, held: frozenset[Role]) -> bool:
        """Whether a small segment has become as long as it may."""
        long = segment >= self._policy.max_small_tokens
        return long and state is State.SMALL and Role.LARGE not in held

    def answerer(self, held: frozenset[Role]) -> Role:
        """Who writes the answer."""
        answer = self._policy.answer
        return answer.other if answer in held else answer

    def writer(self, state: State, role: Role, trigger: Trigger, held: frozenset[Role]) -> Role:
        """Who writes in the `state` that the trigger led to, after `role`."""
        if trigger in (Trigger.EMPTY, Trigger.FALLBACK):
            return role.other
        if state is State.ANSWER:
            return self.answerer(held)
        return Role.SMALL if state is State.SMALL else Role.LARGE

    def outlives(
        self, state: State, role: Role, held: frozenset[Role], *, empty: bool
    ) -> Trigger | None:
        """Why the generation goes on after the model's end of turn; None: it does not. `empty`
        says that nothing came of the answer."""
        if state is State.SMALL and Role.LARGE not in held:
            return Trigger.BOUNDARY
        if state is State.ANSWER:
            missing = empty and role is Role.SMALL and Role.LARGE not in held
            return Trigger.EMPTY if missing else None
        return Trigger.UNCLOSED if self._splitter.phase is Phase.THINKING else None
