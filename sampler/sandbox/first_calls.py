"""The extra time that first calls in new sandboxes may take."""

from __future__ import annotations

import time
from collections.abc import Callable

PERIOD = 60.0
"""Seconds in which a tenant's first calls may take the extra time once."""


class FirstCallCredit:
    """The time that the first calls of each tenant may take beyond the step timeout. Engine thread only.

    A first call often initializes what later calls use: it decodes a vocabulary, for example. All requests wait for it,
    so a tenant with ever new classes gets the extra time once in `PERIOD` (a leaky bucket), and then the step timeout.

    Args:
        step_timeout: seconds that any call may take.
        first_step_timeout: seconds that a first call may take.
        clock: returns seconds.
    """

    def __init__(
        self, step_timeout: float, first_step_timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._step_timeout = step_timeout
        self._seconds = max(0.0, first_step_timeout - step_timeout)
        self._clock = clock
        self._used: dict[str, tuple[float, float]] = {}
        """Tenant → (seconds used, at this time)."""

    def left(self, tenant: str) -> float:
        """Return the extra seconds that a tenant's next first call may take."""
        used, at = self._used.get(tenant, (0.0, 0.0))
        refilled = (self._clock() - at) * self._seconds / PERIOD
        return max(0.0, min(self._seconds, self._seconds - used + refilled))

    def use(self, tenant: str, seconds: float) -> None:
        """Subtract the time that a first call took beyond the step timeout."""
        extra = seconds - self._step_timeout
        if extra > 0:
            self._used[tenant] = self._seconds - self.left(tenant) + extra, self._clock()
