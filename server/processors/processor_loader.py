"""From a processor string to a processor that is ready to run: installed and shipped ones."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from inspect import isabstract
from typing import Any

from logitship.builtin_processors.base import BuiltinProcessor
from logitship.builtin_processors.registry import Registry
from logitship.builtin_processors.sglang_names import installed_by_reference
from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.processor_string import (
    InstalledProcessor,
    PickledProcessor,
    ProcessorString,
    SourceProcessor,
)
from logitship.sampler.processors.executor import LoadedProcessor, ProcessorExecutor
from logitship.sampler.processors.processor_cache import CacheStats, ProcessorCache
from logitship.sampler.processors.request_view import ModelView

from .processor_descriptions import installed_digest
from .processor_names import missing_message


class InvalidParams(ValueError):
    """An installed processor rejects a request's parameters."""


class ProcessorNotAllowed(Exception):
    """A shipped processor is not on the operator's list of allowed processors."""


class ProcessorLoader:
    """Loads installed processors by name, and shipped ones through the cache.

    Args:
        registry: the installed processors.
        cache: loads and keeps shipped processors.
        installed_executor: runs the installed ones: they are the operator's own and need no isolation.
        model: what installed processors check their parameters against.
        allowed_digests: the only shipped processors that may run; None: any may.
    """

    def __init__(
        self,
        registry: Registry,
        cache: ProcessorCache,
        installed_executor: ProcessorExecutor,
        model: ModelView,
        allowed_digests: frozenset[str] | None = None,
    ) -> None:
        self._registry = registry
        self._cache = cache
        self._installed_executor = installed_executor
        self._model = model
        self._allowed_digests = allowed_digests
        self._installed: dict[str, LoadedProcessor] = {}

    @property
    def installed_digests(self) -> dict[str, str]:
        """Names of the installed processors, by digest."""
        return {installed_digest(name): name for name in self._registry}

    def acquire(self, string: ProcessorString, tenant: str) -> LoadedProcessor:
        """Return a processor ready to run. Give it back with `release`.

        Raises:
            ProcessorLoadError: it cannot be loaded, or no processor has that name or digest.
            ProcessorNotAllowed: it is shipped, and not on the operator's list.
            ProcessorCacheFull: the cache cannot take another shipped processor.
        """
        return self._load(string, tenant)[0]

    def prepare(self, processor: LoadedProcessor, params: Mapping[str, Any] | None, *, own: bool = False) -> Any:
        """Return what a built-in processor makes of a request's parameters; None for all other processors.

        Args:
            processor: as `acquire` returned it.
            params: the request's parameters for it.
            own: the parameters are for this processor alone, so an unknown one is an error.

        Raises:
            InvalidParams: the processor rejects the parameters.
            PreparationUnavailable: the parameters cannot be checked now.
        """
        # Installed processors only: a shipped class may derive from a built-in one, and must not run here.
        if processor is not self._installed.get(processor.name) or not isinstance(processor.instance, BuiltinProcessor):
            return None
        if own:
            _check_known(processor.instance, params or {})
        try:
            return processor.instance.prepare(params, self._model)
        except ValueError as error:
            raise InvalidParams(str(error)) from error

    def release(self, processor: LoadedProcessor) -> None:
        """Give back a processor that `acquire` returned."""
        if processor is not self._installed.get(processor.name):
            self._cache.release(processor)

    def cache_stats(self) -> CacheStats:
        """Return the counters and sizes of the cache of shipped processors."""
        return self._cache.stats()

    def clear(self) -> None:
        """Evict every shipped processor that is not in use."""
        self._cache.clear()

    def _load(self, string: ProcessorString, tenant: str) -> tuple[LoadedProcessor, ProcessorString]:
        """Return a processor and the string of exactly what runs: both have the same digest."""
        name = self._installed_name(string)
        if name is not None:
            return self._installed_processor(name), InstalledProcessor(name)
        assert isinstance(string, PickledProcessor | SourceProcessor)
        runnable = string.runnable if isinstance(string, PickledProcessor) else string
        self._check_allowed(runnable.digest)
        return self._cache.acquire(runnable, tenant), runnable

    def _check_allowed(self, digest: str) -> None:
        """Check the digest of what runs: a string may hold one class in its pickle and another in its source."""
        if self._allowed_digests is not None and digest not in self._allowed_digests:
            raise ProcessorNotAllowed(
                f"the processor {digest} is not among those that this server allows: its operator lists them with "
                "--allow-processor"
            )

    def _installed_processor(self, name: str) -> LoadedProcessor:
        if name not in self._registry:
            raise ProcessorLoadError(missing_message(name, self._registry, {}))
        if name not in self._installed:
            instance = self._registry.make(name)
            builtin = instance if isinstance(instance, BuiltinProcessor) else None
            made = LoadedProcessor(
                installed_digest(name),
                name,
                self._installed_executor,
                instance,
                is_mask=builtin is not None and builtin.is_mask,
                is_trusted=builtin is not None,
            )
            self._installed.setdefault(name, made)  # another thread may have been faster: one instance is kept
        return self._installed[name]

    def _installed_name(self, string: ProcessorString) -> str | None:
        if isinstance(string, InstalledProcessor):
            return string.name
        if isinstance(string, PickledProcessor):
            cls = installed_by_reference(string.payload)
            if cls is not None and issubclass(cls, BuiltinProcessor) and not isabstract(cls):
                return cls.name
        return None


def _check_known(processor: BuiltinProcessor, params: Mapping[str, Any]) -> None:
    known = processor.Params.model_fields
    if unknown := sorted(set(params) - set(known)):
        close = difflib.get_close_matches(unknown[0][:80], known, n=1)
        raise InvalidParams(
            f"{unknown[0][:80]}: {processor.name} has no such parameter"
            + (f", did you mean {close[0]}?" if close else f": it takes {', '.join(known)}")
        )
