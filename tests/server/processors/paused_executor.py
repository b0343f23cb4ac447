"""An executor whose loads end when the test says so."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, NoReturn

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.processor_string import ProcessorString, SourceProcessor
from logitship.sampler.processors.executor import LoadedProcessor

LONG = 60.0


class PausedExecutor:
    """Loads nothing. Each load waits until the test ends it, or until it is cancelled, if it can be.

    Attributes:
        began: (tenant, name) of the loads, in the order in which they began.
        cancelled: those that were cancelled.
        most: most loads at a time.
        ready: what `is_ready` returns.
    """

    def __init__(self, *, cancels: bool = True) -> None:
        self._cancels = cancels
        self._changed = threading.Condition()
        self._ends: dict[tuple[str, str], BaseException | None] = {}
        self._keys: dict[tuple[str, str], str] = {}
        self._num_loading = 0
        self.began: list[tuple[str, str]] = []
        self.cancelled: list[tuple[str, str]] = []
        self.most = 0
        self.ready = True

    def load(self, string: ProcessorString, tenant: str = "") -> LoadedProcessor:
        assert isinstance(string, SourceProcessor)
        key = tenant, string.class_name
        with self._changed:
            self._keys[string.digest, tenant] = string.class_name
            self.began.append(key)
            self._num_loading += 1
            self.most = max(self.most, self._num_loading)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: key in self._ends, LONG)
            self._num_loading -= 1
            error = self._ends.pop(key)
            self._changed.notify_all()
        if error is not None:
            raise error
        return LoadedProcessor(string.digest, string.class_name, self, object(), tenant=tenant)

    def cancel_load(self, digest: str, tenant: str) -> bool:
        if self._cancels:
            key = tenant, self._keys[digest, tenant]
            self.cancelled.append(key)
            self.end(*key, ProcessorLoadError("was cancelled"))
        return self._cancels

    def end(self, tenant: str, name: str, error: BaseException | None = None) -> None:
        with self._changed:
            self._ends[tenant, name] = error
            self._changed.notify_all()

    async def until_began(self, *keys: tuple[str, str]) -> None:
        """Wait until exactly these loads have begun, in any order."""

        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: set(keys) <= set(self.began), LONG)

        assert await asyncio.to_thread(wait)
        assert sorted(self.began) == sorted(keys)

    def is_ready(self, processor: LoadedProcessor) -> bool:
        return self.ready

    def ensure(self, processor: LoadedProcessor) -> None:
        self.began.append(("ensured", processor.name))

    def unload(self, processor: LoadedProcessor) -> None:
        pass

    def attach(self, *_: Any) -> NoReturn:
        raise AssertionError("nothing runs")

    def group(self, *_: Any) -> NoReturn:
        raise AssertionError("nothing runs")
