"""Turns of tenants on an event loop."""

from __future__ import annotations

import asyncio
from collections import deque


class TenantTurns:
    """Turns on an event loop: each tenant has one at a time.

    They end with the loop: on the next one, all tenants begin anew.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiting for their turns, by tenant; an item for each tenant that has its turn."""

    async def take(self, tenant: str) -> None:
        """Wait for a turn of a tenant, in order of arrival. It lasts until `end`."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._waiting.clear()
        waiting = self._waiting.get(tenant)
        if waiting is None:
            self._waiting[tenant] = deque()
            return
        turn: asyncio.Future[None] = loop.create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it has just begun
                self.end(tenant)
            raise

    def end(self, tenant: str) -> None:
        """End a turn: the tenant's next one begins."""
        waiting = self._waiting[tenant]
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._waiting[tenant]
