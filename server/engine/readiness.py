"""Readiness: proves that a request could be admitted and stepped now."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import Future

from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor
from logitship.server.refusals import RequestRefused, ThreadUnavailable
from logitship.server.requests.fair_pool import in_daemon_thread

from .active_requests import ActiveRequests
from .engine_thread import EngineThread

READY_TIMEOUT = 1.0
"""Seconds for the engine to begin its next step."""


class Readiness:
    """Finds the reasons why a request could not be admitted and stepped now. Event loop only.

    Args:
        active: admits requests.
        thread: steps the engine.
        sandboxes: started for shipped code; None: the server runs none in sandboxes.
        timeout: seconds for the engine to begin its next step.
    """

    def __init__(
        self,
        active: ActiveRequests,
        thread: EngineThread,
        sandboxes: SandboxExecutor | None,
        timeout: float = READY_TIMEOUT,
    ) -> None:
        self._active = active
        self._thread = thread
        self._sandboxes = sandboxes
        self._timeout = timeout
        self._answer: Future[None] | None = None
        self._reviving: asyncio.Future[None] | None = None

    async def reasons(self) -> list[str]:
        """Return the reasons; empty: a request could be admitted now, and its first step begins within the timeout."""
        answers = await self._answers()
        return list(self._found(answers))

    def _found(self, answers: bool) -> Iterator[str]:
        try:
            self._active.check_capacity()
        except RequestRefused as refused:
            yield refused.message
        if not self._thread.alive:
            yield "the engine's thread has ended"
        elif not answers:
            yield f"the engine has not begun a step within {self._timeout:g} s"
        if self._sandboxes is not None and not self._sandboxes.can_start:
            self._revive(self._sandboxes)
            yield "the process that sandboxes are forked from has ended, and is being started again"

    async def _answers(self) -> bool:
        """Return whether the engine's thread calls a function in time. One call serves all who wait for it."""
        if self._answer is None or self._answer.done():
            answer = self._answer = Future[None]()
            self._thread.post(lambda: answer.set_result(None))
        done, _ = await asyncio.wait([asyncio.wrap_future(self._answer)], timeout=self._timeout)
        return bool(done)

    def _revive(self, sandboxes: SandboxExecutor) -> None:
        """Start the process again in the background: it may be that only a shipping request would, and none is sent."""
        if self._reviving is None or self._reviving.done():
            with contextlib.suppress(ThreadUnavailable):  # the next check tries again
                self._reviving = in_daemon_thread(sandboxes.revive)
