"""The engines of one generation: one replica a role, on which all decodes of that role run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gateway.backends import ReplicaSet
from gateway.engines.tokenization import Prompt
from gateway.errors import GatewayError, UpstreamError
from gateway.openai_api import Ask, RawPrompt
from gateway.pairs import Pair, Side, replicas_of, side_of
from relaygen.events import Role
from relaygen.policy import Policy


@dataclass(frozen=True, slots=True)
class Seat:
    """A role's engine, and the prompt as its model wants it."""

    side: Side
    prompt: Prompt


class Seats:
    """Counted as load of their replicas until they are left."""

    def __init__(
        self,
        policy: Policy,
        ask: Ask,
        raw: RawPrompt | None,
        backends: Mapping[str, ReplicaSet],
        pair: Pair,
        prompts: Mapping[Role, Prompt],
    ) -> None:
        self._policy = policy
        self._ask = ask
        self._raw = raw
        self._backends = backends
        self.pair = pair
        self._seats: dict[Role, Seat] = {}
        for role, side in pair.sides.items():
            self._sit(role, Seat(side, prompts[role]))

    def seat(self, role: Role) -> Seat:
        """Raises UpstreamError where the role has none."""
        if role in self._seats:
            return self._seats[role]
        assert self.pair.absent is not None
        raise self.pair.absent[1]

    def sides(self) -> list[Side]:
        return [seat.side for seat in self._seats.values()]

    def leave(self) -> None:
        for seat in self._seats.values():
            seat.side.replica.left()
        self._seats = {}

    def up(self, role: Role) -> bool:
        """Whether any engine of the role is, and has not its breaker open."""
        return replicas_of(self._policy, role, self._backends).up

    def others(self, role: Role, avoid: Collection[str]) -> bool:
        """Whether the role has another engine to go to."""
        return bool(replicas_of(self._policy, role, self._backends).others(avoid))

    def stays(self, role: Role, avoid: Collection[str]) -> bool:
        """Whether the role sits on an engine that is up, and none of those to avoid."""
        seat = self._seats.get(role)
        if seat is None or seat.side.replica.info is None:
            return False
        return seat.side.engine.url not in avoid

    async def move(self, role: Role, avoid: Collection[str]) -> bool:
        """Takes another engine for the role. Returns whether ids go on being understood there.

        Raises UpstreamError where there is none.
        """
        failed: GatewayError | None = None
        for replica in replicas_of(self._policy, role, self._backends).others(avoid):
            try:
                side = await side_of(self._policy, role, replica)
                ids = self._shares_ids(role, side)
                if not ids and self._needs_ids:
                    continue
                seat = Seat(side, await self._prompt(role, side))
            except GatewayError as error:  # also its refusal of what another engine took
                failed = error
                continue
            self._sit(role, seat)
            return ids
        if isinstance(failed, UpstreamError):
            raise failed
        raise UpstreamError(f"No other engine of the {role} model can go on") from failed

    @property
    def _needs_ids(self) -> bool:
        """Whether what was asked makes no sense with another vocabulary."""
        return self.pair.handoff == "tokens" and (
            isinstance(self._raw, tuple) or self._ask.ids is not None
        )

    def _sit(self, role: Role, seat: Seat) -> None:
        seat.side.replica.taken()
        if (old := self._seats.get(role)) is not None:
            old.side.replica.left()
        self._seats[role] = seat

    async def _prompt(self, role: Role, side: Side) -> Prompt:
        old = self._seats.get(role)
        if old is not None and _kind(old.side) == _kind(side):
            return old.prompt
        return await side.prompt(self._policy, self._ask, self._raw)

    def _shares_ids(self, role: Role, side: Side) -> bool:
        others = [seat.side for other, seat in self._seats.items() if other is not role]
        before = self._seats.get(role)
        known = [*others, *([before.side] if before else [])]
        return side.ids and all(side.vocabulary == other.vocabulary for other in known)


def _kind(side: Side) -> tuple[object, ...]:
    """Engines that are alike in this take the same prompt."""
    return (side.info.dialect, side.vocabulary, side.prefill, side.closed)
