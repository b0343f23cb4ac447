"""The server's processors: installed, shipped, and registered ones, and callables by name."""

from __future__ import annotations

from logitship.builtin_processors.registry import Registry
from logitship.client.processor_info import ProcessorInfo
from logitship.client.serialization.processor_string import PickledProcessor, ProcessorString
from logitship.sampler.processors.executor import LoadedProcessor, ProcessorExecutor
from logitship.sampler.processors.processor_cache import ProcessorCache
from logitship.sampler.processors.request_view import ModelView

from .callable_library import CallableLibrary
from .named_processors import NamedProcessors
from .processor_descriptions import registered_info
from .processor_loader import ProcessorLoader
from .registered_processors import RegisteredProcessors
from .registration import Upload


class ProcessorLibrary(ProcessorLoader):
    """A `ProcessorLoader` that also finds registered processors, by name or digest.

    Args:
        registry: the installed processors.
        cache: loads and keeps shipped processors.
        installed_executor: runs the installed ones: they are the operator's own and need no isolation.
        model: what installed processors check their parameters against.
        registered: keeps the strings of registered processors.
        callables: makes request-level callables by name.
        allowed_digests: the only shipped processors that may run; None: any may.

    Attributes:
        names: resolves names and digests.
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
        super().__init__(registry, cache, installed_executor, model, allowed_digests)
        self._registered = registered
        self.callables = callables
        self.names = NamedProcessors(registry, registered)

    @property
    def num_registered(self) -> int:
        """Number of registered processors of all tenants."""
        return len(self._registered)

    def ships_code(self, string: ProcessorString, tenant: str) -> bool:
        """Return False if the processor is installed: by name, by SGLang's reference to its own, or registered."""
        return self._installed_name(self.names.find(string, tenant)) is None

    def register(self, string: ProcessorString, tenant: str, name: str | None = None) -> ProcessorInfo:
        """Keep a string as a version of a name. Loads it once to check it.

        The name is visible to its tenant only; other tenants may use the digest. Each tenant loads its own instance.

        Args:
            string: the processor to keep.
            tenant: who registers it.
            name: name of the registered processor; None: the name of its class.

        Raises:
            InvalidName: it cannot be registered under that name.
            ProcessorLoadError: it cannot be loaded, no processor has that name or digest, or it is too large to keep.
            ProcessorNotAllowed: it is shipped, and not on the operator's list.
            ProcessorCacheFull: the cache cannot take another shipped processor.
            RegistryFull: the registry cannot take another processor of this tenant.
        """
        if name is not None:  # before its code runs for nothing
            self.names.check_name(name, self._installed_name(string))
        processor, string = self._load(string, tenant)
        try:
            self.names.check_name(name or processor.name, self._installed_name(string))
            return registered_info(self._registered.add(_upload(name, processor, string), tenant))
        finally:
            self.release(processor)

    def _load(self, string: ProcessorString, tenant: str) -> tuple[LoadedProcessor, ProcessorString]:
        return super()._load(self.names.resolve(string, tenant), tenant)


def _upload(name: str | None, processor: LoadedProcessor, string: ProcessorString) -> Upload:
    schema = processor.params_schema
    if schema is None and isinstance(string, PickledProcessor):
        schema = string.params_schema  # the sandbox drops a schema that is too long for its reply
    return Upload(name or processor.name, processor.digest, string, processor.description, schema)
