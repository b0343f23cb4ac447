"""The processors and artifacts that clients uploaded, for the routes that list, add and delete them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from logitship.builtin_processors.params import PreparationUnavailable
from logitship.client.errors import ProcessorLoadError
from logitship.client.processor_info import ProcessorDetails, ProcessorInfo
from logitship.client.serialization.artifact import missing_artifact
from logitship.client.serialization.processor_string import InstalledProcessor, ProcessorString
from logitship.sampler.processors.executor import ExecutorUnavailable
from logitship.sampler.processors.processor_cache import ProcessorCacheFull
from logitship.server.refusals import (
    BadRequest,
    Forbidden,
    NotFound,
    QueueFull,
    RequestTooLarge,
    ServiceUnavailable,
)
from logitship.server.requests.fair_pool import FairPool

from .artifact_store import ArtifactStoreFull, ArtifactTooLarge, StoredArtifact
from .load_queue import LoadQueue, LoadQueueFull
from .params_checker import InvalidParams
from .processor_library import InvalidName, NotDeletable, ProcessorLibrary, ProcessorNotAllowed
from .registered_processors import NotRegistered, RegistryFull


class UploadedProcessors:
    """Registers and lists processors, and keeps artifacts. Errors are refusals.

    Args:
        library: the processors.
        loads: loads the shipped ones.
        pool: hashes artifacts, and loads installed processors.

    Attributes:
        artifacts: what shipped processors refer to by digest.
    """

    def __init__(self, library: ProcessorLibrary, loads: LoadQueue, pool: FairPool) -> None:
        self._library = library
        self._loads = loads
        self._pool = pool
        self.artifacts = library.artifacts
        self._keep_artifact = library.add_artifact

    def list_all(self, tenant: str) -> list[ProcessorInfo]:
        """Return the processors that a tenant's requests can name."""
        return self._library.names.list_all(tenant)

    def details(self, reference: str, tenant: str) -> ProcessorDetails:
        """Describe a processor by its name, its name and version, or its digest.

        Raises:
            NotFound: there is none.
        """
        try:
            return self._library.names.details(reference, tenant)
        except NotRegistered as error:
            raise NotFound(str(error), param="id") from error

    def delete(self, reference: str, tenant: str) -> list[str]:
        """Delete a version that the tenant registered, or all versions of a name or a digest.

        Requests that were admitted keep the processor.

        Returns:
            Their ids.

        Raises:
            NotFound: there is none.
            Forbidden: it is installed.
        """
        try:
            return self._library.names.delete(reference, tenant)
        except NotRegistered as error:
            raise NotFound(str(error), param="id") from error
        except NotDeletable as error:
            raise Forbidden(str(error), param="id") from error

    async def add_artifact(self, data: bytes, tenant: str) -> StoredArtifact:
        """Keep an artifact of a tenant.

        Raises:
            RequestTooLarge: the whole store is too small for it.
            ServiceUnavailable: there is no space for it.
            QueueFull: too many requests of the tenant wait for a thread.
        """
        try:
            return await self._pool.run(tenant, self._keep_artifact, data, tenant)
        except ArtifactTooLarge as error:
            raise RequestTooLarge(str(error)) from error
        except ArtifactStoreFull as error:
            raise ServiceUnavailable(str(error)) from error

    def list_artifacts(self, tenant: str) -> list[StoredArtifact]:
        """Return a tenant's artifacts."""
        return self.artifacts.list_own(tenant)

    def artifact(self, digest: str, tenant: str) -> StoredArtifact:
        """Return a tenant's artifact.

        Raises:
            NotFound: it has none of this digest.
        """
        found = self.artifacts.find(digest, tenant)
        if found is None:
            raise NotFound(str(missing_artifact(digest[:80])), param="digest")
        return found

    def delete_artifact(self, digest: str, tenant: str) -> None:
        """Delete a tenant's artifact. Loaded processors keep it.

        Raises:
            NotFound: it has none of this digest.
        """
        if not self.artifacts.remove(digest, tenant):
            raise NotFound(str(missing_artifact(digest[:80])), param="digest")

    async def register(self, string: ProcessorString, tenant: str, name: str | None) -> ProcessorInfo:
        """Register a processor: see `AsyncEngine.register`. Waits until it is loaded."""
        try:
            with load_errors_refused(param=None):
                found = self._library.find_to_register(string, tenant, name)
                if isinstance(found, InstalledProcessor):
                    processor = await self._pool.run(tenant, self._library.acquire, found, tenant)
                else:
                    processor = await self._loads.acquire(found, tenant)
                try:
                    return self._library.add_registration(processor, found, tenant, name)
                finally:
                    self._library.release(processor)
        except InvalidName as error:
            raise BadRequest(f"name: {error}", param="name") from error
        except RegistryFull as error:
            raise ServiceUnavailable(str(error)) from error

    def ships_code(self, string: ProcessorString, tenant: str) -> bool:
        """Return True if a request with this processor needs `--enable-custom-logit-processor`."""
        return self._library.ships_code(string, tenant)


@contextlib.contextmanager
def load_errors_refused(param: str | None) -> Iterator[None]:
    """Turn load errors into refusals of the field `param`."""
    try:
        yield
    except InvalidParams as error:
        raise BadRequest(str(error), param=f"{param}.params") from error
    except ProcessorLoadError as error:
        raise BadRequest(str(error), param=param) from error
    except ProcessorNotAllowed as error:
        raise Forbidden(str(error), param=param) from error
    except LoadQueueFull as error:
        raise QueueFull(str(error), param=param) from error
    except (ProcessorCacheFull, ExecutorUnavailable, PreparationUnavailable) as error:
        raise ServiceUnavailable(str(error), param=param) from error
