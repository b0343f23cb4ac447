"""The executor of an engine's front end: it loads each shipped class once, to check it, and runs nothing."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.processor_string import PickledProcessor, ProcessorString, SourceProcessor
from logitship.sampler.processors.executor import ExecutorSequence, LoadedProcessor, ProcessorExecutor, failed_before

SLOW_LOAD = 0.1
"""Seconds. Loading that failed sooner is cheap, and may be tried again at once."""
REFUSAL_TTL = 600.0
"""Seconds. Refusals expire: the machine may have been busy when a correct class was loaded."""
MAX_VERDICTS = 4096
"""Most classes that are remembered as loadable, and most that are remembered as refused."""


class AdmissionExecutor:
    """A `ProcessorExecutor` that loads processors and unloads them at once.

    Other requests may have to wait for a load: vLLM's front end loads on its event loop. A class that took long and
    could not be loaded, such as one that hangs, is therefore refused by its digest for a while without another attempt.
    The `ProcessorCache` that calls this executor remembers the classes that could be loaded.

    Args:
        executor: loads the processors.
        clock: returns seconds.
    """

    def __init__(self, executor: ProcessorExecutor, clock: Callable[[], float] = time.monotonic) -> None:
        self._executor = executor
        self._clock = clock
        self._refused: OrderedDict[str, tuple[float, str]] = OrderedDict()
        """Digest → (time until which it is refused, reason); the oldest first."""

    def load(self, string: ProcessorString, tenant: str = "") -> LoadedProcessor:
        """See `ProcessorExecutor.load`."""
        assert isinstance(string, PickledProcessor | SourceProcessor)  # the cache passes no others
        start = self._clock()
        until, reason = self._refused.get(string.digest, (start, ""))
        if start < until:
            raise failed_before(reason, until - start)
        try:
            processor = self._executor.load(string, tenant)
        except ProcessorLoadError as error:
            end = self._clock()
            if end - start >= SLOW_LOAD:
                self._refuse(string.digest, end + REFUSAL_TTL, str(error))
            raise
        self._executor.unload(processor)
        return processor

    def ensure(self, processor: LoadedProcessor) -> None:
        """Do nothing: the processor was loaded once."""

    def is_ready(self, processor: LoadedProcessor) -> bool:
        """Return True: the processor was loaded once."""
        return True

    def cancel_load(self, digest: str, tenant: str) -> bool:
        """Return False: the thread that loads is the one that could cancel."""
        return False

    def unload(self, processor: LoadedProcessor) -> None:
        """Do nothing: the processor is unloaded already."""

    def restrict(self, processor: LoadedProcessor, rows: Any, allowed: Any) -> NoReturn:
        """Raise: no processor runs here."""
        raise AssertionError("a processor that is only loaded for admission does not run")

    def attach(self, processor: LoadedProcessor, sequence: ExecutorSequence) -> NoReturn:
        """Raise: no processor runs here."""
        raise AssertionError("a processor that is only loaded for admission does not run")

    def group(self, processor: LoadedProcessor, rows: Any) -> NoReturn:
        """Raise: no processor runs here."""
        raise AssertionError("a processor that is only loaded for admission does not run")

    def _refuse(self, digest: str, until: float, reason: str) -> None:
        self._refused.pop(digest, None)  # it becomes the last
        self._refused[digest] = until, reason
        if len(self._refused) > MAX_VERDICTS:
            self._refused.popitem(last=False)
