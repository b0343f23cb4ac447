"""Loads the processors of a request in vLLM's workers before the engine gets it: no step waits for a class.

The front end asks the workers between two steps, by vLLM's `collective_rpc`, until they have loaded them. Requests to
`LLM`, which has no event loop, are loaded by the step that they begin in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .callers import find_caller

_METHOD = "logitship_must_wait"
_READY_FOR = 0.1
"""Seconds for which a front end does not ask again: each question costs workers of several ranks the end of a step."""
_DELAYS = (0.01, 0.25)
"""Shortest and longest time between two questions, in seconds."""
_GROWTH = 1.5


def answer_front_ends(must_wait: Callable[[dict[str, Any]], bool]) -> None:
    """Let front ends ask the worker that makes the plugin.

    Args:
        must_wait: see `VllmSeat.must_wait`.

    Raises:
        ValueError: logitship does not know this vLLM's workers.
    """
    worker = find_caller("WorkerBase")
    if worker is None:
        raise ValueError("logitship does not know the worker of this vLLM: it knows those of 0.32 and 0.33")
    setattr(worker, _METHOD, must_wait)


class WorkerLoads:
    """The processors that the workers of an engine have loaded, as far as a front end knows.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ready_until: dict[tuple[str, str], float] = {}

    async def wait(self, llm: Any, extra_args: Mapping[str, Any], tenant: str, digests: Iterable[str]) -> None:
        """Wait until the workers have loaded the processors of a request, or know that they can't, and none is paused.

        Args:
            llm: vLLM's `AsyncLLM`.
            extra_args: the request's, with its tenant.
            tenant: who sent it.
            digests: the digests of its shipped processors.
        """
        now = self._clock()
        keys = {(tenant, digest) for digest in digests}
        if all(self._ready_until.get(key, now) > now for key in keys):
            return
        delay, longest = _DELAYS
        while any(await llm.collective_rpc(_METHOD, args=(dict(extra_args),))):
            await asyncio.sleep(delay)
            delay = min(longest, delay * _GROWTH)
        now = self._clock()
        self._ready_until = {key: until for key, until in self._ready_until.items() if until > now}
        self._ready_until |= dict.fromkeys(keys, now + _READY_FOR)
