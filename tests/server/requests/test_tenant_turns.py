from __future__ import annotations

import asyncio
import contextlib

from logitship.server.requests.tenant_turns import TenantTurns


def test_turns_of_a_tenant_follow_one_another() -> None:
    async def scenario() -> None:
        turns = TenantTurns()
        order: list[str] = []

        async def take(name: str, tenant: str) -> None:
            await turns.take(tenant)
            order.append(name)

        tasks = [asyncio.ensure_future(take(name, name[0])) for name in ("a1", "a2", "a3", "a4", "b1")]
        await asyncio.sleep(0)
        assert order == ["a1", "b1"]
        tasks[1].cancel()
        turns.end("a")
        await tasks[2]
        assert order == ["a1", "b1", "a3"]
        turns.end("a")
        tasks[3].cancel()  # it has its turn, but does not know it yet
        with contextlib.suppress(asyncio.CancelledError):
            await tasks[3]
        await take("a5", "a")
        assert order == ["a1", "b1", "a3", "a5"]
        for tenant in "ab":
            turns.end(tenant)
        assert turns._waiting == {}

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_turns_end_with_their_event_loop() -> None:
    turns = TenantTurns()
    for _ in range(2):
        asyncio.run(asyncio.wait_for(turns.take("a"), 10))
