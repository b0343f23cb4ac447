"""Loads the processors of a request in vLLM's workers before the engine gets it: no step waits for a class.

The front end asks the workers between two steps, by vLLM's `collective_rpc`, until they have loaded them. Requests to
`LLM`, which has no event loop, are loaded by the step that they begin in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .callers import find_caller

_METHOD = "logitship_must_wait"
_READY_FOR = 0.1
"""Seconds for which a front end does not ask again: each question costs workers of several ranks the end of a step."""
_DELAYS = (0.01, 0.25)
"""Shortest and longest time between two questions, in seconds."""
_GROWTH = 1.5
_PATIENCE = 1.0
"""Seconds between two looks whether the engine still runs, while it does not answer."""


def answer_front_ends(must_wait: Callable[[dict[str, Any] | None, Sequence[str]], bool]) -> None:
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
        self._ready_until: dict[str, float] = {}
        self._asking: dict[frozenset[str], asyncio.Task[None]] = {}

    async def wait(self, llm: Any, extra_args: Mapping[str, Any], names: Sequence[str]) -> None:
        """Wait until the workers have loaded the processors of a request, or know that they can't, and none is paused.

        Requests with the same processors are asked about together.

        Args:
            llm: vLLM's `AsyncLLM`.
            extra_args: the request's, with its tenant.
            names: its shipped processors, as `PluginProcessors.group_names` returns them.

        Raises:
            BaseException: the engine has ended, see `AsyncLLM.dead_error`.
        """
        now = self._clock()
        if all(self._ready_until.get(name, now) > now for name in names):
            return
        key = frozenset(names)
        task = self._asking.get(key)
        if task is None:
            task = self._asking[key] = asyncio.create_task(self._ask_until_ready(llm, dict(extra_args), names))
            task.add_done_callback(lambda _: self._asking.pop(key, None))
        await asyncio.shield(task)

    async def _ask_until_ready(self, llm: Any, extra_args: dict[str, Any], names: Sequence[str]) -> None:
        delay, longest = _DELAYS
        while await _ask(llm, extra_args, names):
            still_wait = True
            while still_wait:  # without the strings, which may be long
                await asyncio.sleep(delay)
                delay = min(longest, delay * _GROWTH)
                still_wait = await _ask(llm, None, names)
        now = self._clock()
        self._ready_until = {name: until for name, until in self._ready_until.items() if until > now}
        self._ready_until |= dict.fromkeys(names, now + _READY_FOR)


async def _ask(llm: Any, extra_args: dict[str, Any] | None, names: Sequence[str]) -> bool:
    """Ask the workers of all engines, and return whether one must wait."""
    arguments = ("collective_rpc", _METHOD, None, (extra_args, [*names]), None)
    asked = asyncio.ensure_future(llm.engine_core.call_utility_all_async(*arguments))
    try:
        while not (await asyncio.wait([asked], timeout=_PATIENCE))[0]:
            if llm.errored:  # it will not answer, nor say so
                raise llm.dead_error
    finally:
        asked.cancel()
    return any(answer for answers in asked.result() for answer in answers)
