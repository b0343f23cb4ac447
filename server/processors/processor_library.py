"""From the processor string in a request to a processor that is ready to run."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from inspect import isabstract
from typing import Any

from logitship.builtin_processors.base import BuiltinProcessor
from logitship.builtin_processors.registry import Registry
from logitship.builtin_processors.sglang_names import installed_by_reference
from logitship.client.processor_info import ProcessorInfo
from logitship.client.serialization.processor_string import (
    InstalledProcessor,
    PickledProcessor,
    ProcessorString,
    SourceProcessor,
)
from logitship.sampler.processors.executor import LoadedProcessor, ProcessorExecutor
from logitship.sampler.processors.processor_cache import CacheStats, ProcessorCache
from logitship.sampler.processors.request_view import ModelView

from .callable_library import CallableLibrary
from .named_processors import NamedProcessors
from .processor_descriptions import installed_digest, registered_info
from .registered_processors import RegisteredProcessors
from .registration import Upload


class InvalidParams(ValueError):
    """An installed processor does not take a request's parameters for it."""


class ProcessorNotAllowed(Exception):
    """The operator's list of processors that may be shipped does not have this one."""


class ProcessorLibrary:
    """Installed processors by name, shipped ones through the cache, registered ones by name or digest.

    Args:
        registry: the installed processors.
        cache: loads and keeps shipped ones.
        installed_executor: runs the installed ones: they are the operator's own and need no isolation.
        model: what installed processors check their parameters against.
        registered: keeps the strings of registered ones.
        callables: makes request-level ones by name.
        allowed_digests: of the only shipped processors that may run; None: any may.

    Attributes:
        names: what names and digests stand for.
    """

    def __init__(
        self,
        registry: Registry,
        cache: ProcessorCache,
        installed_executor: ProcessorExecutor,
        model: ModelView,
        registered: RegisteredProcessors,
        callables: CallableLibrary,
        allowed_digests: frozenset[str] | None = None,
    ) -> None:
        self._registry = registry
        self._cache = cache
        self._installed_executor = installed_executor
        self._model = model
        self._registered = registered
        self._allowed_digests = allowed_digests
        self.callables = callables
        self.names = NamedProcessors(registry, registered)
        self._installed: dict[str, LoadedProcessor] = {}

    @property
    def installed_digests(self) -> dict[str, str]:
        """The names of the installed processors, by their digests."""
        return {installed_digest(name): name for name in self._registry}

    @property
    def num_registered(self) -> int:
        """How many are registered, of all tenants together."""
        return len(self._registered)

    def ships_code(self, string: ProcessorString, tenant: str) -> bool:
        """False if the processor is installed: asked for by name, by SGLang's reference to its own, or registered."""
        return self._installed_name(self.names.find(string, tenant)) is None

    def register(self, string: ProcessorString, tenant: str, name: str | None = None) -> ProcessorInfo:
        """Keep a string as a version of a name. It is loaded once for that.

        The name is its tenant's alone; the digest may be told to others. What is loaded is each tenant's own.

        Args:
            name: what it goes by; None: its class's name.

        Raises:
            InvalidName: it cannot go by that.
            ProcessorLoadError: it cannot be loaded, nothing has that name or digest, or it is too large to be kept.
            ProcessorNotAllowed: it is shipped, and not on the operator's list.
            ProcessorCacheFull: there is no room to load another shipped one.
            RegistryFull: there is no room to keep it.
        """
        if name is not None:  # before its code runs for nothing
            self.names.check_name(name, self._installed_name(string))
        processor, string = self._load(string, tenant)
        try:
            self.names.check_name(name or processor.name, self._installed_name(string))
            return registered_info(self._registered.add(_upload(name, processor, string), tenant))
        finally:
            self.release(processor)

    def acquire(self, string: ProcessorString, tenant: str) -> LoadedProcessor:
        """A processor ready to run; give it back with `release`.

        Raises:
            ProcessorLoadError: it cannot be loaded, or nothing has that name or digest.
            ProcessorNotAllowed: it is shipped, and not on the operator's list.
            ProcessorCacheFull: there is no room for another shipped one.
        """
        return self._load(string, tenant)[0]

    def prepare(self, processor: LoadedProcessor, params: Mapping[str, Any] | None, *, own: bool = False) -> Any:
        """What a processor that comes with logitship makes of a request's parameters; None for others.

        Args:
            own: the parameters are for it alone. One that it does not know is then a mistake.

        Raises:
            InvalidParams: it does not take them.
            PreparationUnavailable: nobody can say now whether it does.
        """
        # Only of what is installed: what is shipped may derive from a built-in class, and is not run here.
        if processor is not self._installed.get(processor.name) or not isinstance(processor.instance, BuiltinProcessor):
            return None
        if own:
            _check_known(processor.instance, params or {})
        try:
            return processor.instance.prepare(params, self._model)
        except ValueError as error:
            raise InvalidParams(str(error)) from error

    def release(self, processor: LoadedProcessor) -> None:
        """Say that one user of `processor` is done."""
        if processor is not self._installed.get(processor.name):
            self._cache.release(processor)

    def cache_stats(self) -> CacheStats:
        """Counters and sizes of the shipped ones."""
        return self._cache.stats()

    def clear(self) -> None:
        """Forget every shipped processor that is not in use."""
        self._cache.clear()

    def _load(self, string: ProcessorString, tenant: str) -> tuple[LoadedProcessor, ProcessorString]:
        """A processor, and the string of exactly what runs: its digest is the processor's."""
        string = self.names.resolve(string, tenant)
        name = self._installed_name(string)
        if name is not None:
            return self._installed_processor(name), InstalledProcessor(name)
        assert isinstance(string, PickledProcessor | SourceProcessor)
        runnable = string.runnable if isinstance(string, PickledProcessor) else string
        self._check_allowed(runnable.digest)
        return self._cache.acquire(runnable, tenant), runnable

    def _check_allowed(self, digest: str) -> None:
        """Asked about what runs: a string may claim one thing in its pickle and another in its source."""
        if self._allowed_digests is not None and digest not in self._allowed_digests:
            raise ProcessorNotAllowed(
                f"the processor {digest} is not among those that this server allows: its operator lists them with "
                "--allow-processor"
            )

    def _installed_processor(self, name: str) -> LoadedProcessor:
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
            self._installed.setdefault(name, made)  # another thread may have been faster: there is one of each
        return self._installed[name]

    def _installed_name(self, string: ProcessorString) -> str | None:
        if isinstance(string, InstalledProcessor):
            return string.name
        if isinstance(string, PickledProcessor):
            cls = installed_by_reference(string.payload)
            if cls is not None and issubclass(cls, BuiltinProcessor) and not isabstract(cls):
                return cls.name
        return None


def _upload(name: str | None, processor: LoadedProcessor, string: ProcessorString) -> Upload:
    schema = processor.params_schema
    if schema is None and isinstance(string, PickledProcessor):
        schema = string.params_schema  # it may be too long to travel out of a sandbox
    return Upload(name or processor.name, processor.digest, string, processor.description, schema)


def _check_known(processor: BuiltinProcessor, params: Mapping[str, Any]) -> None:
    known = processor.Params.model_fields
    if unknown := sorted(set(params) - set(known)):
        close = difflib.get_close_matches(unknown[0][:80], known, n=1)
        raise InvalidParams(
            f"{unknown[0][:80]}: {processor.name} has no such parameter"
            + (f", did you mean {close[0]}?" if close else f": it takes {', '.join(known)}")
        )
