"""Retry conditions and delays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from logitship.client.http.http_requests import HttpRequest
from logitship.client.http.retries import RetryPolicy

GET = HttpRequest("GET", "/health", idempotent=True)
POST = HttpRequest("POST", "/generate", {})
LONGEST = RetryPolicy(max_retries=10, random=lambda: 1.0)


@pytest.mark.parametrize(
    ("request_", "sent", "again"), [(GET, True, True), (GET, False, True), (POST, True, False), (POST, False, True)]
)
def test_only_safe_requests_are_retried(request_: HttpRequest, sent: bool, again: bool) -> None:
    assert (RetryPolicy().delay_after_failure(request_, 0, sent=sent) is not None) is again


@pytest.mark.parametrize(
    ("status", "get", "post"),
    [
        (400, False, False),
        (404, False, False),
        (429, True, True),
        (500, False, False),
        (502, True, False),
        (503, True, True),
        (504, True, False),
    ],
)
def test_retried_statuses(status: int, get: bool, post: bool) -> None:
    policy = RetryPolicy()
    assert (policy.delay_after_status(GET, 0, status, {}) is not None) is get
    assert (policy.delay_after_status(POST, 0, status, {}) is not None) is post


def test_max_retries() -> None:
    policy = RetryPolicy(max_retries=2)
    for attempt, again in ((0, True), (1, True), (2, False)):
        assert (policy.delay_after_failure(GET, attempt, sent=True) is not None) is again
        assert (policy.delay_after_status(GET, attempt, 503, {}) is not None) is again
    assert RetryPolicy(max_retries=0).delay_after_failure(GET, 0, sent=False) is None


def test_delay_doubles_up_to_limit() -> None:
    delays = [LONGEST.delay_after_failure(GET, attempt, sent=False) for attempt in range(7)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_half_of_delay_is_random() -> None:
    assert RetryPolicy(random=lambda: 0.0).delay_after_failure(GET, 0, sent=False) == 0.25


@pytest.mark.parametrize(
    ("value", "delay"),
    [
        ("7", 7.0),
        ("0", 0.0),
        (" 3 ", 3.0),
        ("soon", 0.5),
        ("-5", 0.5),
        ("60", 60.0),
        ("61", None),
        ("Fri, 31 Dec 9999 23:59:59 -0100", 0.5),
    ],
)
def test_retry_after_seconds(value: str, delay: float | None) -> None:
    assert LONGEST.delay_after_status(POST, 0, 429, {"retry-after": value}) == delay


@pytest.fixture
def time_zone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize("form", ["%a, %d %b %Y %H:%M:%S GMT", "%a %b %d %H:%M:%S %Y"])
@pytest.mark.usefixtures("time_zone")
def test_retry_after_date(form: str) -> None:
    """A date without a zone is in UTC."""
    soon = (datetime.now(UTC) + timedelta(seconds=30)).strftime(form)
    delay = LONGEST.delay_after_status(POST, 0, 503, {"retry-after": soon})
    assert delay is not None
    assert 20 < delay <= 30
    past = format_datetime(datetime.now(UTC) - timedelta(days=1), usegmt=True)
    assert LONGEST.delay_after_status(POST, 0, 503, {"retry-after": past}) == 0.0
