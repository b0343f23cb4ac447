"""The server's processors: installed, shipped, and registered ones, and callables by name.

`NamedProcessors` resolves names and digests in requests, `ProcessorLoader` loads installed and shipped processors from
processor strings, and `ProcessorLibrary` does both.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from logitship.builtin_processors.base import BuiltinProcessor
from logitship.builtin_processors.registry import Registry
from logitship.builtin_processors.sglang_names import INSTALLED_BY_REFERENCE
from logitship.client.errors import ProcessorLoadError
from logitship.client.processor_info import ProcessorDetails, ProcessorInfo
from logitship.client.serialization.artifact import Artifact, bytes_of
from logitship.client.serialization.processor_string import (
    InstalledProcessor,
    PickledProcessor,
    ProcessorString,
    RegisteredProcessor,
    SourceProcessor,
)
from logitship.sampler.client_context import on_behalf_of
from logitship.sampler.processors.executor import LoadedProcessor, ProcessorExecutor
from logitship.sampler.processors.processor_cache import CacheStats, ProcessorCache
from logitship.sampler.processors.request_view import ModelView

from .artifact_store import ArtifactStore, ArtifactStoreFull, StoredArtifact
from .callable_library import CallableLibrary
from .load_queue import Runnable
from .params_checker import InvalidParams, ParamsChecker
from .processor_descriptions import (
    installed_details,
    installed_digest,
    installed_info,
    registered_details,
    registered_info,
)
from .processor_names import NAME_RULE, is_name, missing_message
from .registered_processors import NotRegistered, RegisteredProcessors
from .registration import Upload


class InvalidName(ValueError):
    """A processor cannot be registered under a name."""


class NotDeletable(Exception):
    """The processor is installed by the operator, so clients cannot delete it."""


class NamedProcessors:
    """Resolves a name to the installed processor, if there is one, else to the tenant's registered one.

    Args:
        installed: the installed processors.
        registered: the registered ones.
    """

    def __init__(self, installed: Registry, registered: RegisteredProcessors) -> None:
        self._installed = installed
        self._registered = registered

    def list_all(self, tenant: str) -> list[ProcessorInfo]:
        """Return the installed processors by name, then the tenant's own by name and version."""
        installed = [installed_info(name, self._installed.get(name)) for name in self._installed]
        return installed + [registered_info(each) for each in self._registered.list_own(tenant)]

    def details(self, reference: str, tenant: str) -> ProcessorDetails:
        """Describe a processor by its name, name and version, or digest, with its source.

        Raises:
            NotRegistered: the tenant has no such processor.
        """
        if name := self._installed_name(reference):
            return installed_details(name, self._installed.get(name))
        if own := self._registered.find_own(reference, tenant):
            return registered_details(own[-1])
        raise self._missing(reference, tenant)

    def delete(self, reference: str, tenant: str) -> list[str]:
        """Delete a version that the tenant registered, or all versions of a name or of a digest.

        Returns:
            Their ids.

        Raises:
            NotRegistered: the tenant has no such processor.
            NotDeletable: it is installed.
        """
        if removed := self._registered.remove(reference, tenant):
            return [each.id for each in removed]
        if name := self._installed_name(reference):
            raise NotDeletable(f"{name} is installed: only the server's operator can remove it")
        raise self._missing(reference, tenant)

    def find(self, string: ProcessorString, tenant: str) -> ProcessorString:
        """As `resolve`, but do not count it as a use, and return the string itself if nothing is registered."""
        reference = self._reference(string)
        found = None if reference is None else self._registered.find(reference, tenant)
        return string if found is None else found.upload.string

    def resolve(self, string: ProcessorString, tenant: str) -> ProcessorString:
        """Replace the name or digest of a registered processor by its string. Return all other strings unchanged.

        Raises:
            NotRegistered: no such processor is registered.
        """
        reference = self._reference(string)
        if reference is None:
            return string
        if isinstance(string, RegisteredProcessor):
            return self._registered.use_digest(reference, tenant).upload.string
        if found := self._registered.use_name(reference, tenant):
            return found.upload.string
        raise self._missing(reference, tenant)

    def check_name(self, name: str, installed: str | None) -> None:
        """Refuse a name that requests could not use.

        Args:
            name: the name to register under.
            installed: the name of the installed processor that is to be registered; None: it is not an installed one.

        Raises:
            InvalidName: it is malformed, or the name of another processor that is installed.
        """
        if not is_name(name):
            raise InvalidName(f"{name[:80]!r} is not a name for a registered processor, which has {NAME_RULE}")
        if name in self._installed and name != installed:
            raise InvalidName(
                f"{name!r} is the name of an installed processor, and requests with it get that one: choose another"
            )

    def _reference(self, string: ProcessorString) -> str | None:
        """Return the digest or name of a registered processor; None for all other strings."""
        if isinstance(string, RegisteredProcessor):
            return string.digest
        if isinstance(string, InstalledProcessor) and string.name not in self._installed:
            return string.name
        return None

    def _installed_name(self, reference: str) -> str | None:
        return next((name for name in self._installed if reference in (name, installed_digest(name))), None)

    def _missing(self, reference: str, tenant: str) -> NotRegistered:
        return NotRegistered(missing_message(reference, self._installed, self._registered.names(tenant)))


class ProcessorNotAllowed(Exception):
    """A shipped processor is not on the operator's list of allowed processors."""


class ProcessorBlocked(ProcessorNotAllowed):
    """A shipped processor is on the operator's list of blocked ones."""


class ProcessorLoader:
    """Loads installed processors by name, and shipped ones through the cache.

    Args:
        registry: the installed processors.
        cache: loads and keeps shipped processors.
        installed_executor: runs the installed ones: they are the operator's own and need no isolation.
        model: what installed processors check their parameters against.
        params_checker: checks parameters against the `params_schema` of a class; None: they have been checked.
        allowed_digests: the only shipped processors that may run; None: any may.
        blocked_digests: returns the shipped processors that may not run, at this moment.
        check_artifacts: called with the artifacts of a shipped processor and its tenant; raises if one is missing.

    Attributes:
        cache: the cache.
    """

    def __init__(
        self,
        registry: Registry,
        cache: ProcessorCache,
        installed_executor: ProcessorExecutor,
        model: ModelView,
        params_checker: ParamsChecker | None,
        allowed_digests: frozenset[str] | None = None,
        check_artifacts: Callable[[Iterable[Artifact], str], object] = lambda artifacts, _: bytes_of(artifacts),
        blocked_digests: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self._registry = registry
        self.cache = cache
        self._installed_executor = installed_executor
        self._model = model
        self._params_checker = params_checker
        self._allowed_digests = allowed_digests
        self._blocked_digests = blocked_digests
        self._check_artifacts = check_artifacts
        self._installed: dict[str, LoadedProcessor] = {}

    @property
    def installed_digests(self) -> dict[str, str]:
        """Names of the installed processors, by digest."""
        return {installed_digest(name): name for name in self._registry}

    def acquire(self, string: ProcessorString, tenant: str) -> LoadedProcessor:
        """Return a processor ready to run. Give it back with `release`.

        Raises:
            ProcessorLoadError: it cannot be loaded, or no processor has that name or digest.
            ProcessorNotAllowed: it is shipped, and not on the operator's list, or blocked.
            ProcessorCacheFull: the cache cannot take another shipped processor.
        """
        found = self.find(string, tenant)
        if isinstance(found, InstalledProcessor):
            return self._installed_processor(found.name)
        return self.cache.acquire(found, tenant)

    def find(self, string: ProcessorString, tenant: str) -> InstalledProcessor | Runnable:
        """Return the string of exactly what runs for a string. Loads nothing.

        Returns:
            The name of an installed processor, or a shipped processor for the cache.

        Raises:
            ProcessorLoadError: no form of it runs on this Python, or no processor has that name or digest.
            ProcessorNotAllowed: it is shipped, and not on the operator's list, or blocked.
        """
        name = self._installed_name(string)
        if name is not None:
            return InstalledProcessor(name)
        if isinstance(string, RegisteredProcessor):
            raise NotRegistered(f"{string.digest}: no processors are registered here; send the whole processor string")
        assert isinstance(string, PickledProcessor | SourceProcessor)
        runnable = string.runnable if isinstance(string, PickledProcessor) else string
        self._check_allowed(runnable.digest)
        if runnable.artifacts:
            self._check_artifacts(runnable.artifacts, tenant)
        return runnable

    def prepare(
        self,
        processor: LoadedProcessor,
        params: Mapping[str, Any] | None,
        *,
        tenant: str = "",
        own: bool = False,
        in_beams: bool = False,
    ) -> Any:
        """Check a request's parameters, and return what a built-in processor makes of them; None for all others.

        Blocks if the class has a `params_schema`.

        Args:
            processor: as `acquire` returned it.
            params: the request's parameters for it.
            tenant: who sent the request.
            own: the parameters are for this processor alone, so an unknown one is an error.
            in_beams: the request is a beam search.

        Raises:
            InvalidParams: the processor rejects the parameters.
            ProcessorLoadError: the `params_schema` of an installed class is invalid.
            PreparationUnavailable: the parameters cannot be checked now.
        """
        if self._params_checker is not None:
            self._params_checker.check(processor, params or {}, tenant)
        # Installed processors only: a shipped class may derive from a built-in one, and must not run here.
        if processor is not self._installed.get(processor.name) or not isinstance(processor.instance, BuiltinProcessor):
            return None
        if own:
            _check_known(processor.instance, params or {})
        try:
            with on_behalf_of(tenant):
                if in_beams:
                    params = processor.instance.params_in_beams(params or {})
                return processor.instance.prepare(params, self._model)
        except ValueError as error:
            raise InvalidParams(str(error)) from error

    def release(self, processor: LoadedProcessor) -> None:
        """Give back a processor that `acquire` returned."""
        if processor is not self._installed.get(processor.name):
            self.cache.release(processor)

    def cache_stats(self) -> CacheStats:
        """Return the counters and sizes of the cache of shipped processors."""
        return self.cache.stats()

    def clear(self) -> None:
        """Evict every shipped processor that is not in use."""
        self.cache.clear()

    def close(self) -> None:
        """End the thread of the cache of shipped processors, and the processes that check parameters."""
        self.cache.close()
        if self._params_checker is not None:
            self._params_checker.close()

    def _check_allowed(self, digest: str) -> None:
        """Check the digest of what runs: a string may hold one class in its pickle and another in its source."""
        if digest in self._blocked_digests():
            raise ProcessorBlocked(f"the processor {digest} is blocked by this server's operator")
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
                params_schema=None if builtin is not None else getattr(instance, "params_schema", None),
            )
            self._installed.setdefault(name, made)  # another thread may have been faster: one instance is kept
        return self._installed[name]

    def _installed_name(self, string: ProcessorString) -> str | None:
        if isinstance(string, InstalledProcessor):
            return string.name
        if isinstance(string, PickledProcessor):
            cls = INSTALLED_BY_REFERENCE.get(string.reference)
            return None if cls is None else cls.name
        return None


def _check_known(processor: BuiltinProcessor, params: Mapping[str, Any]) -> None:
    known = processor.Params.model_fields
    if unknown := sorted(set(params) - set(known)):
        close = difflib.get_close_matches(unknown[0][:80], known, n=1)
        raise InvalidParams(
            f"{unknown[0][:80]}: {processor.name} has no such parameter"
            + (f", did you mean {close[0]}?" if close else f": it takes {', '.join(known)}")
        )


class ProcessorLibrary(ProcessorLoader):
    """A `ProcessorLoader` that also finds registered processors, by name or digest.

    Args:
        registry: the installed processors.
        cache: loads and keeps shipped processors.
        installed_executor: runs the installed ones: they are the operator's own and need no isolation.
        model: what installed processors check their parameters against.
        registered: keeps the strings of registered processors.
        callables: makes request-level callables by name.
        params_checker: checks parameters against the `params_schema` of a class; None: they have been checked.
        allowed_digests: the only shipped processors that may run; None: any may.
        artifacts: what shipped processors refer to by digest.
        blocked_digests: returns the shipped processors that may not run, at this moment.

    Attributes:
        names: resolves names and digests.
        artifacts: as given.
    """

    def __init__(
        self,
        registry: Registry,
        cache: ProcessorCache,
        installed_executor: ProcessorExecutor,
        model: ModelView,
        registered: RegisteredProcessors,
        callables: CallableLibrary,
        params_checker: ParamsChecker | None,
        allowed_digests: frozenset[str] | None = None,
        artifacts: ArtifactStore | None = None,
        blocked_digests: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self.artifacts = artifacts or ArtifactStore(max_bytes=0)
        super().__init__(
            registry,
            cache,
            installed_executor,
            model,
            params_checker,
            allowed_digests,
            self.artifacts.resolve,
            blocked_digests,
        )
        self._registered = registered
        self.callables = callables
        self.names = NamedProcessors(registry, registered)

    @property
    def num_registered(self) -> int:
        """Number of registered processors of all tenants."""
        return len(self._registered)

    def ships_code(self, string: ProcessorString, tenant: str) -> bool:
        """Return True if a class that a client sent runs, now or by an earlier registration.

        False for installed processors, however they are named.
        """
        return self._installed_name(self.names.find(string, tenant)) is None

    def find_to_register(self, string: ProcessorString, tenant: str, name: str | None) -> InstalledProcessor | Runnable:
        """As `find`, for a processor that is to be registered.

        Checks the name first, so that no code is loaded for a name that is refused.

        Raises:
            InvalidName: it cannot be registered under that name.
            ProcessorLoadError: as `find`.
            ProcessorNotAllowed: as `find`.
        """
        if name is not None:
            self.names.check_name(name, self._installed_name(string))
        return self.find(string, tenant)

    def add_registration(
        self, processor: LoadedProcessor, string: ProcessorString, tenant: str, name: str | None
    ) -> ProcessorInfo:
        """Keep a string as a version of a name.

        The name is visible to its tenant only; other tenants may use the digest. Each tenant loads its own instance.

        Args:
            processor: loaded from `string`, to check it.
            string: what `find_to_register` returned.
            tenant: who registers it.
            name: name of the registered processor; None: the name of its class.

        Raises:
            InvalidName: it cannot be registered under that name.
            ProcessorLoadError: it is too large to keep.
            RegistryFull: the registry cannot take another processor of this tenant.
        """
        self.names.check_name(name or processor.name, self._installed_name(string))
        return registered_info(self._registered.add(_upload(name, processor, string), tenant))

    def add_artifact(self, data: bytes, tenant: str) -> StoredArtifact:
        """Keep an artifact of a tenant. If there is no space, idle processors with artifacts are unloaded.

        Raises:
            ArtifactTooLarge: the whole store is too small for it.
            ArtifactStoreFull: there is none then either.
        """
        while True:
            try:
                return self.artifacts.add(data, tenant)
            except ArtifactStoreFull as error:
                if not any(self.cache.evict_with_artifacts(each) for each in error.tenants):
                    raise

    def find(self, string: ProcessorString, tenant: str) -> InstalledProcessor | Runnable:
        """As `ProcessorLoader.find`, also for the name or the digest of a registered processor."""
        return super().find(self.names.resolve(string, tenant), tenant)


def _upload(name: str | None, processor: LoadedProcessor, string: ProcessorString) -> Upload:
    return Upload(name or processor.name, processor.digest, string, processor.description, processor.params_schema)
