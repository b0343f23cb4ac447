from __future__ import annotations

import pytest
from pyrate_limiter import InMemoryBucket

from logitship.server.rate_limits import RateLimit
from logitship.server.refusals import RateLimited


class Clock:
    """Milliseconds that the buckets see."""

    now = 1_000_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(InMemoryBucket, "now", lambda _: clock.now)
    return clock


def allowed(limit: RateLimit, tenant: str, attempts: int) -> int:
    """Return how many of the attempts are allowed."""
    count = 0
    for _ in range(attempts):
        try:
            limit.check(tenant)
        except RateLimited:
            continue
        count += 1
    return count


def test_any_number_by_default(clock: Clock) -> None:
    assert allowed(RateLimit("requests", 0), "a", 1000) == 1000


def test_each_tenant_has_its_own_limit(clock: Clock) -> None:
    limit = RateLimit("requests", 3)
    assert [allowed(limit, tenant, 10) for tenant in ("a", "b", "", "a")] == [3, 3, 3, 0]


def test_the_window_slides(clock: Clock) -> None:
    limit = RateLimit("requests", 2)
    limit.check("a")
    clock.now += 40_000
    assert allowed(limit, "a", 5) == 1
    clock.now += 20_001  # the first one is a minute ago
    assert allowed(limit, "a", 5) == 1
    clock.now += 120_000
    assert allowed(limit, "a", 5) == 2


def test_retry_after_is_when_it_succeeds(clock: Clock) -> None:
    limit = RateLimit("requests", 1)
    limit.check("a")
    clock.now += 15_000
    with pytest.raises(RateLimited) as refused:
        limit.check("a")
    assert refused.value.retry_after in (45, 46)
    clock.now += 1000 * refused.value.retry_after
    limit.check("a")


def test_memory_is_bounded(clock: Clock) -> None:
    limit = RateLimit("requests", 5)
    for _ in range(100):
        allowed(limit, "a", 20)
        clock.now += 30_000
    assert len(limit._buckets["a"].items) <= 5


@pytest.mark.parametrize(("tenant", "who"), [("a", "this API key"), ("", "the server")])
def test_message_names_the_flag(tenant: str, who: str, clock: Clock) -> None:
    limit = RateLimit("processor_loads", 1)
    limit.check(tenant)
    with pytest.raises(
        RateLimited, match=rf"^{who} has reached its limit of 1 processor loads per minute \(--processor-loads-per-min"
    ) as refused:
        limit.check(tenant)
    assert (refused.value.status_code, refused.value.what) == (429, "processor_loads")
