from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.engine.readiness import Readiness
from logitship.server.refusals import ServiceUnavailable
from tests.helpers.engine_requests import BuildEngine, request

HoldEngine = Callable[[AsyncEngine], AbstractContextManager[None]]
SOON, PATIENCE = 0.05, 60.0


def readiness_of(engine: AsyncEngine, timeout: float = PATIENCE, sandboxes: Any = None) -> Readiness:
    return Readiness(engine._active, engine._thread, sandboxes, timeout)


def test_an_idle_engine_is_ready(make_engine: BuildEngine) -> None:
    asyncio.run(make_engine().check_ready())


async def test_a_step_that_hangs(make_engine: BuildEngine, hold_engine: HoldEngine) -> None:
    engine = make_engine()
    readiness = readiness_of(engine, SOON)
    with hold_engine(engine):
        for _ in range(3):
            assert await readiness.reasons() == ["the engine has not begun a step within 0.05 s"]
        # Probes of a server that hangs for hours do not pile up.
        assert len(engine._thread._inbox) == 1
    readiness._timeout = PATIENCE
    assert await readiness.reasons() == []


async def test_concurrent_probes(make_engine: BuildEngine, hold_engine: HoldEngine) -> None:
    engine = make_engine()
    readiness = readiness_of(engine)
    with hold_engine(engine):
        probes = [asyncio.create_task(readiness.reasons()) for _ in range(5)]
        await asyncio.sleep(0)
        probes[0].cancel()  # the client has disconnected
        await asyncio.sleep(0)
    assert await asyncio.gather(*probes[1:]) == [[]] * 4


async def test_a_full_queue(make_engine: BuildEngine, hold_engine: HoldEngine) -> None:
    engine = make_engine(max_num_seqs=1, max_queued_requests=0)
    with hold_engine(engine):
        stream = await engine.submit(request(max_tokens=1))
        reasons = await readiness_of(engine, SOON).reasons()
    assert reasons[0] == "the queue is full: 1 sequences run or wait, at most 1 may: try again later"
    async for _ in stream:
        pass
    await stream.aclose()


async def test_shutdown(make_engine: BuildEngine) -> None:
    engine = make_engine()
    engine._active.close()
    with pytest.raises(ServiceUnavailable, match=r"^not ready: the server is shutting down$"):
        await engine.check_ready()
    engine.stop()
    assert "the engine's thread has ended" in await readiness_of(engine, SOON).reasons()


@dataclass
class Sandboxes:
    """Sandboxes whose zygote died."""

    can_start: bool = False
    started: threading.Event = field(default_factory=threading.Event)
    revivals: int = 0

    def revive(self) -> None:
        self.revivals += 1
        assert self.started.wait(PATIENCE)
        self.can_start = True


async def test_a_dead_zygote_is_started_again(make_engine: BuildEngine) -> None:
    engine, sandboxes = make_engine(), Sandboxes()
    readiness = readiness_of(engine, sandboxes=sandboxes)
    for _ in range(3):
        (reason,) = await readiness.reasons()
        assert reason.startswith("the process that sandboxes are forked from has ended")
    sandboxes.started.set()
    assert readiness._reviving is not None
    await readiness._reviving
    assert await readiness.reasons() == []
    assert sandboxes.revivals == 1
