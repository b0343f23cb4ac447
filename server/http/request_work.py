"""The CPU work of a request before its first step: decoding, validating, tokenizing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from logitship.server.requests.fair_pool import FairPool

P = ParamSpec("P")
T = TypeVar("T")

LARGE_BODY = 1 << 16
"""Bytes of a body beyond which nothing is done with it on the event loop. Smaller ones take a few milliseconds."""


@dataclass(frozen=True)
class RequestWork:
    """Runs the work of one request on the threads that tenants share.

    Attributes:
        pool: the threads.
        tenant: who sent the request.
        body_size: bytes of its body.
    """

    pool: FairPool
    tenant: str
    body_size: int

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function on a thread.

        Raises:
            QueueFull: too many requests of the tenant wait for that.
        """
        return await self.pool.run(self.tenant, function, *args, **kwargs)

    async def run_if_large(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function whose time depends on the size of the body: on a thread if that is large, else here."""
        if self.body_size <= LARGE_BODY:
            return function(*args, **kwargs)
        return await self.run(function, *args, **kwargs)
