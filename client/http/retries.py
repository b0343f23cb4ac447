"""Retry policy: a request is only sent again if it did not run, or may run twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from .http_requests import HttpRequest

_REFUSED = frozenset({429, 503})
"""The server rejected the request: nothing ran."""
_GATEWAY = frozenset({502, 504})
"""A gateway in front of the server failed: the request may have run."""


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with jitter (half of each wait is random), at most `max_retries` times.

    Attributes:
        max_retries: maximum number of retries; 0: none.
        initial_delay: longest wait before the first retry, in seconds; doubles with each retry.
        max_delay: longest wait without a `Retry-After` header, in seconds.
        max_retry_after: longest accepted `Retry-After`, in seconds; if the server asks for more, the error is raised
            immediately.
        random: returns a random number from 0 to 1.
    """

    max_retries: int = 2
    initial_delay: float = 0.5
    max_delay: float = 8.0
    max_retry_after: float = 60.0
    random: Callable[[], float] = random.random

    def delay_after_failure(self, request: HttpRequest, attempt: int, *, sent: bool) -> float | None:
        """Return the seconds to wait after an attempt without a response; None: do not retry.

        Args:
            request: the request.
            attempt: number of attempts before this one.
            sent: whether part of it may have reached the server.
        """
        if attempt >= self.max_retries or (sent and not request.idempotent):
            return None
        return self._backoff(attempt)

    def delay_after_status(
        self, request: HttpRequest, attempt: int, status_code: int, headers: Mapping[str, str]
    ) -> float | None:
        """Return the seconds to wait after a response with an error status; None: do not retry."""
        may_retry = status_code in _REFUSED or (status_code in _GATEWAY and request.idempotent)
        if attempt >= self.max_retries or not may_retry:
            return None
        requested = _retry_after(headers.get("retry-after"))
        if requested is None:
            return self._backoff(attempt)
        return requested if requested <= self.max_retry_after else None

    def _backoff(self, attempt: int) -> float:
        longest = min(self.max_delay, self.initial_delay * 2.0**attempt)
        return longest * (0.5 + 0.5 * self.random())


def _retry_after(value: str | None) -> float | None:
    """Parse a `Retry-After` header to seconds: a number, or a date (RFC 9110, section 10.2.3)."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        moment = parsedate_to_datetime(value)
        # Without a zone, as in asctime's format, it is in UTC.
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())
