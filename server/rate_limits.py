"""Rate limits per tenant: `--requests-per-minute` and `--processor-loads-per-minute`."""

from __future__ import annotations

import math
import threading
from typing import cast

from pyrate_limiter import Duration, InMemoryBucket, Rate, RateItem

from .refusals import RateLimited


class RateLimit:
    """Limits how often each tenant may do something, in any 60 seconds. Thread-safe.

    Args:
        what: `requests` or `processor_loads`: the flag is `--<what>-per-minute`, the metric's label is `what`.
        per_minute: how often; 0: without a limit.
    """

    def __init__(self, what: str, per_minute: int) -> None:
        self._what = what
        self._per_minute = per_minute
        self._buckets: dict[str, InMemoryBucket] = {}
        self._lock = threading.Lock()

    def check(self, tenant: str) -> None:
        """Count one for a tenant.

        Raises:
            RateLimited: the tenant has reached the limit; it is not counted.
        """
        if not self._per_minute:
            return
        with self._lock:
            bucket = self._bucket(tenant)
            now: int = bucket.now()  # type: ignore[no-untyped-call]
            bucket.leak(now)
            item = RateItem(self._what, now)
            if bucket.put(item):
                return
            wait = math.ceil(cast(int, bucket.waiting(item)) / 1000)
        flag, who = f"--{self._what.replace('_', '-')}-per-minute", "this API key" if tenant else "the server"
        raise RateLimited(
            f"{who} has reached its limit of {self._per_minute} {self._what.replace('_', ' ')} per minute ({flag}): "
            f"try again in {wait} s",
            what=self._what,
            retry_after=wait,
        )

    def _bucket(self, tenant: str) -> InMemoryBucket:
        # As many as there are API keys.
        if tenant not in self._buckets:
            self._buckets[tenant] = InMemoryBucket([Rate(self._per_minute, Duration.MINUTE)])
        return self._buckets[tenant]
