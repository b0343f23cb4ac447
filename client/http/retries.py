"""When to send a request again: only where it cannot run twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from .http_requests import HttpRequest

_REFUSED = frozenset({429, 503})
"""The server turned the request away: nothing ran."""
_GATEWAY = frozenset({502, 504})
"""Something between us and the server failed: it may have run."""


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with jitter (half of each wait is random), at most `max_retries` times.

    Attributes:
        max_retries: how often a request is sent again; 0: never.
        initial_delay: longest wait before the first retry, in seconds; it doubles with each.
        max_delay: longest wait of our own choice, in seconds.
        max_retry_after: longest wait that the server may ask for, in seconds; if it asks for more, the error is raised
            at once.
        random: a number from 0 to 1, drawn anew at each call.
    """

    max_retries: int = 2
    initial_delay: float = 0.5
    max_delay: float = 8.0
    max_retry_after: float = 60.0
    random: Callable[[], float] = random.random

    def delay_after_failure(self, request: HttpRequest, attempt: int, *, sent: bool) -> float | None:
        """Seconds to wait before the next attempt, after one without an answer; None: give up.

        Args:
            request: what was tried.
            attempt: how many attempts there were before this one.
            sent: whether any of it may have reached the server.
        """
        if attempt >= self.max_retries or (sent and not request.idempotent):
            return None
        return self._backoff(attempt)

    def delay_after_status(
        self, request: HttpRequest, attempt: int, status_code: int, headers: Mapping[str, str]
    ) -> float | None:
        """The same after an answer with an error status."""
        again = status_code in _REFUSED or (status_code in _GATEWAY and request.idempotent)
        if attempt >= self.max_retries or not again:
            return None
        asked = _retry_after(headers.get("retry-after"))
        if asked is None:
            return self._backoff(attempt)
        return asked if asked <= self.max_retry_after else None

    def _backoff(self, attempt: int) -> float:
        longest = min(self.max_delay, self.initial_delay * 2.0**attempt)
        return longest * (0.5 + 0.5 * self.random())


def _retry_after(value: str | None) -> float | None:
    """Seconds that a `Retry-After` header asks for: a number, or a date (RFC 9110, section 10.2.3)."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (moment.astimezone(UTC) - datetime.now(UTC)).total_seconds())
