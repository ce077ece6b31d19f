"""Passive health of one replica: a circuit breaker, and a slow start after it was away. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.settings import HealthSettings

_LONGEST_S = 60.0
"""That a breaker stays open, however often it opened, or that a wish for patience holds."""
_FIRST_SHARE = 0.1
"""Of its load, that a replica gets when it comes back."""


class Health:
    """What its requests tell of a replica. `clock` gives seconds.

    So many failures in a row open the breaker. When its time is over one request is let through:
    its success closes the breaker, its failure opens it for twice as long.
    """

    def __init__(
        self, settings: HealthSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._failures = 0
        self._seconds = settings.cooldown  # that it stays open next
        self._open_until: float | None = None
        self._trial_until = 0.0
        self._busy_until = 0.0
        self._up_since: float | None = None

    @property
    def open(self) -> bool:
        """Whether requests had better go elsewhere."""
        if self._open_until is None:
            return False
        return self._clock() < max(self._open_until, self._trial_until)

    @property
    def resting(self) -> bool:
        """Whether it is too early even for a trial."""
        return self._open_until is not None and self._clock() < self._open_until

    @property
    def busy(self) -> bool:
        """Whether it asked for patience."""
        return self._clock() < self._busy_until

    @property
    def share(self) -> float:
        """Of its usual load, that it should get now: 0.1 to 1."""
        ramp = self._settings.slow_start
        if self._up_since is None or not ramp:
            return 1.0
        share = max(_FIRST_SHARE, (self._clock() - self._up_since) / ramp)
        if share >= 1.0:
            self._up_since = None
        return min(share, 1.0)

    def chosen(self) -> None:
        """A request goes there."""
        if self._open_until is not None and not self.open:
            self._trial_until = self._clock() + self._settings.cooldown

    def failed(self) -> float | None:
        """Returns for how many seconds the breaker opens by it, None where it does not."""
        self._failures += 1
        if self._open_until is None and self._failures < self._settings.failures:
            return None
        if self.resting:
            return None  # asked before it opened, or because there was no other: no trial
        seconds = self._seconds
        self._open_until = self._clock() + seconds
        self._trial_until = 0.0
        self._seconds = min(2 * seconds, max(_LONGEST_S, self._settings.cooldown))
        return seconds

    def asked_for_patience(self, seconds: float) -> None:
        """It has too much to do: no failure, but others are asked before it for a while."""
        self._busy_until = self._clock() + min(seconds, _LONGEST_S)

    def succeeded(self) -> bool:
        """Returns whether that closes the breaker."""
        closes = self._open_until is not None
        if closes:
            self.came_back()
        self._failures = 0
        return closes

    def came_back(self) -> None:
        """It was away: its caches are cold, and it gets its load little by little."""
        self._failures = 0
        self._seconds = self._settings.cooldown
        self._open_until = None
        self._up_since = self._clock()
