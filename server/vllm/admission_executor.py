"""Where the front end tries what was shipped: it is loaded once, and let go of. Nothing runs there."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.processor_string import PickledProcessor, ProcessorString, SourceProcessor
from logitship.sampler.processors.executor import ExecutorSequence, LoadedProcessor, ProcessorExecutor

SLOW = 0.1
"""Seconds. A trial that failed sooner is no burden, and may be repeated."""
REMEMBERED = 600.0
"""Seconds. Not for ever: the machine may have been busy when an honest class was tried."""
_MOST_REMEMBERED = 4096


class AdmissionExecutor:
    """A `ProcessorExecutor` that loads processors and lets go of them at once.

    vLLM's front end waits for a trial on its event loop, with all its other requests. So a class that took long and
    could not be loaded, such as one that hangs, is refused by its digest for a while without another trial. Those that
    could be loaded are remembered by the cache that asks.

    Args:
        executor: loads them.
        clock: seconds.
    """

    def __init__(self, executor: ProcessorExecutor, clock: Callable[[], float] = time.monotonic) -> None:
        self._executor = executor
        self._clock = clock
        self._refused: OrderedDict[str, tuple[float, str]] = OrderedDict()
        """Digest → until when, and why; the oldest first."""

    def load(self, string: ProcessorString, tenant: str = "") -> LoadedProcessor:
        """See `ProcessorExecutor.load`."""
        assert isinstance(string, PickledProcessor | SourceProcessor)  # the cache takes no others
        began = self._clock()
        until, reason = self._refused.get(string.digest, (began, ""))
        if began < until:
            raise ProcessorLoadError(f"{reason} (as it was; it is tried again in {until - began:.0f} s)")
        try:
            processor = self._executor.load(string, tenant)
        except ProcessorLoadError as error:
            ended = self._clock()
            if ended - began >= SLOW:
                self._remember(string.digest, ended + REMEMBERED, str(error))
            raise
        self._executor.unload(processor)
        return processor

    def ensure(self, processor: LoadedProcessor) -> None:
        """It could be loaded once."""

    def unload(self, processor: LoadedProcessor) -> None:
        """It is unloaded already."""

    def attach(self, processor: LoadedProcessor, sequence: ExecutorSequence) -> NoReturn:
        """Never called: nothing runs here."""
        raise AssertionError("a processor that is on trial does not run")

    def group(self, processor: LoadedProcessor, rows: Any) -> NoReturn:
        """Never called."""
        raise AssertionError("a processor that is on trial does not run")

    def _remember(self, digest: str, until: float, reason: str) -> None:
        self._refused.pop(digest, None)  # it becomes the last
        self._refused[digest] = until, reason
        if len(self._refused) > _MOST_REMEMBERED:
            self._refused.popitem(last=False)
