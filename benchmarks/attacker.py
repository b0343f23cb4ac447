"""Sends the requests of a hostile client, and counts the responses."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Attacker:
    """Two API keys and the connections of a hostile client.

    Attributes:
        url: of the server.
        key: an API key that may generate.
        shipping_key: one that may ship code.
        http: sends requests.
        until: `time.monotonic()` at the end of the attack.
        sent: number of requests that were begun.
        statuses: number of responses by status; "gone" for connections that ended without one.
    """

    url: str
    key: str
    shipping_key: str
    http: httpx.AsyncClient
    until: float
    sent: int = 0
    statuses: dict[str, int] = field(default_factory=dict)

    @property
    def goes_on(self) -> bool:
        """True until the end of the attack."""
        return time.monotonic() < self.until

    async def post(self, path: str, body: bytes, *, ships: bool = False, method: str = "POST") -> int:
        """Send a body, and return the status; 0 if the connection ended without one."""
        key = self.shipping_key if ships else self.key
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self.sent += 1
        try:
            response = await self.http.request(method, path, content=body, headers=headers)
        except httpx.HTTPError:
            self._count("gone")
            return 0
        self._count(self.outcome(response))
        return response.status_code

    def outcome(self, response: httpx.Response) -> str:
        """Return the name under which a response is counted."""
        return str(response.status_code)

    async def abandon(self, path: str, body: bytes, after: float, *, ships: bool = False) -> None:
        """Send a body, and close the connection after some seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(after):
                await self.post(path, body, ships=ships)
                return
        self._count("abandoned")

    async def repeat(self, clients: int, path: str, body: bytes, *, ships: bool = False) -> None:
        """Let a number of clients send the same body again and again."""
        await self.all(clients, lambda _: self.post(path, body, ships=ships))

    async def all(self, clients: int, request: Callable[[int], Awaitable[Any]]) -> None:
        """Let a number of clients send requests, one after the other, until the end.

        Args:
            clients: number of requests at a time.
            request: sends the request with the given number.
        """
        numbers = itertools.count()

        async def client() -> None:
            while self.goes_on:
                began = time.monotonic()
                await request(next(numbers))
                if time.monotonic() - began < 0.02:  # refused: leave the CPU to the server
                    await asyncio.sleep(0.02)

        await asyncio.gather(*(client() for _ in range(clients)))

    def _count(self, status: str) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1


def dumps(body: Any) -> bytes:
    """Return the bytes of a body."""
    return json.dumps(body, separators=(",", ":")).encode()
