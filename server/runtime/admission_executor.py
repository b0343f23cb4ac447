"""The executor of an engine's front end: it loads each shipped class once, to check it, and runs nothing."""

from __future__ import annotations

from typing import Any, NoReturn

from logitship.client.serialization.processor_string import ProcessorString
from logitship.sampler.processors.executor import ExecutorSequence, LoadedProcessor, ProcessorExecutor

MAX_VERDICTS = 4096
"""Most classes that are remembered as loadable."""


class AdmissionExecutor:
    """A `ProcessorExecutor` that loads processors and unloads them at once.

    The `ProcessorCache` that calls this executor remembers the classes that could be loaded.

    Args:
        executor: loads the processors.

    Attributes:
        executor: the same.
    """

    def __init__(self, executor: ProcessorExecutor) -> None:
        self.executor = executor

    def load(self, string: ProcessorString, tenant: str = "") -> LoadedProcessor:
        """See `ProcessorExecutor.load`."""
        processor = self.executor.load(string, tenant)
        self.executor.unload(processor)
        return processor

    def ensure(self, processor: LoadedProcessor) -> None:
        """Do nothing: the processor was loaded once."""

    def is_ready(self, processor: LoadedProcessor) -> bool:
        """Return True: the processor was loaded once."""
        return True

    def cancel_load(self, digest: str, tenant: str) -> bool:
        """See `ProcessorExecutor.cancel_load`."""
        return self.executor.cancel_load(digest, tenant)

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
