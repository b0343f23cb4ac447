"""The processors that requests attach, name and register, with every error as a refusal."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from prometheus_client import Histogram

from logitship.builtin_processors.params import PreparationUnavailable
from logitship.client.errors import ProcessorLoadError
from logitship.client.processor_info import ProcessorDetails, ProcessorInfo
from logitship.client.serialization.processor_string import InstalledProcessor, ProcessorString, RegisteredProcessor
from logitship.sampler.processors.executor import LoadedProcessor
from logitship.sampler.processors.processor_cache import ProcessorCacheFull
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.server.refusals import BadRequest, Forbidden, NotFound, ServiceUnavailable
from logitship.server.requests.messages import AttachedProcessor, CallableRequest, GenerationRequest, ProcessorRequest

from .processor_library import InvalidName, InvalidParams, NotDeletable, ProcessorLibrary, ProcessorNotAllowed
from .registered_processors import NotRegistered, RegistryFull


class RequestProcessors:
    """Loads, registers and lists processors for requests. Errors are refusals that name the request's field.

    Args:
        library: loads the processors.
        load_time: histogram of the load time of each of a request's processors.
    """

    def __init__(self, library: ProcessorLibrary, load_time: Histogram) -> None:
        self._library = library
        self._load_time = load_time

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

    def register(self, string: ProcessorString, tenant: str, name: str | None) -> ProcessorInfo:
        """Register a processor: see `AsyncEngine.register`. Waits until it is loaded."""
        try:
            with _load_errors_refused(param=None):
                return self._library.register(string, tenant, name)
        except InvalidName as error:
            raise BadRequest(f"name: {error}", param="name") from error
        except RegistryFull as error:
            raise ServiceUnavailable(str(error)) from error

    def ships_code(self, string: ProcessorString, tenant: str) -> bool:
        """Return True if a request with this processor needs `--enable-custom-logit-processor`."""
        return self._library.ships_code(string, tenant)

    def check_callable(self, wanted: CallableRequest) -> None:
        """Refuse a callable whose name the operator did not allow.

        Raises:
            ProcessorLoadError: it is not allowed; the message names the flag.
        """
        self._library.callables.check_allowed(wanted.target)

    def pin(self, request: GenerationRequest, pins: dict[ProcessorString, ProcessorString]) -> GenerationRequest:
        """Return the request with the names of its processors resolved.

        Otherwise `submit` resolves them for each request, and requests of a batch may get different versions.

        Args:
            request: the request.
            pins: names that were resolved for the same batch before; new ones are added.

        Raises:
            BadRequest: no processor has that name; `param` is `processors[i]`.
        """
        processors = list(request.processors)
        for index, wanted in enumerate(processors):
            if isinstance(wanted, ProcessorRequest) and isinstance(
                wanted.string, RegisteredProcessor | InstalledProcessor
            ):
                with _load_errors_refused(param=f"processors[{index}]"):
                    pins[wanted.string] = pins.get(wanted.string) or self._library.names.resolve(
                        wanted.string, request.tenant
                    )
                processors[index] = dataclasses.replace(wanted, string=pins[wanted.string])
        return dataclasses.replace(request, processors=tuple(processors))

    def load(self, request: GenerationRequest, held: list[LoadedProcessor]) -> list[list[ProcessorUse]]:
        """Load the request's processors, and return the uses of each sequence in order.

        Args:
            request: the request.
            held: each processor is added as soon as it is loaded; the caller gives them back with `release`.

        Raises:
            RequestRefused: a processor cannot be loaded, or rejects its parameters.
        """
        uses: list[list[ProcessorUse]] = [[] for _ in range(request.num_started)]
        prepared: dict[tuple[int, int], Any] = {}
        for index, wanted in enumerate(request.processors):
            with self._load_time.time(), _load_errors_refused(param=f"processors[{index}]"):
                for sequence_uses, use in zip(uses, self._uses(request, held, wanted, prepared), strict=True):
                    sequence_uses.append(use)
        return uses

    def release(self, held: list[LoadedProcessor]) -> None:
        """Give back the processors that `load` added to `held`."""
        for processor in held:
            self._library.release(processor)

    def _uses(
        self,
        request: GenerationRequest,
        held: list[LoadedProcessor],
        wanted: AttachedProcessor,
        prepared: dict[tuple[int, int], Any],
    ) -> list[ProcessorUse]:
        """Return a use for each sequence, of the same processor, or of its own callable.

        Args:
            request: the request.
            held: see `load`.
            wanted: the processor or callable.
            prepared: results of `prepare` for this request so far, by the identities of processor and parameters.
        """
        if isinstance(wanted, CallableRequest):
            made = [self._library.callables.make(wanted) for _ in range(request.num_started)]
            return [ProcessorUse(callable_, {}, request.rid) for callable_ in made]
        processor = self._library.acquire(wanted.string, request.tenant)
        held.append(processor)
        key = id(processor), id(wanted.params)
        if key not in prepared:
            prepared[key] = self._library.prepare(processor, wanted.params, own=wanted.own)
        params = dict(wanted.params or {})
        return [ProcessorUse(processor, params, request.rid, prepared[key]) for _ in range(request.num_started)]


@contextlib.contextmanager
def _load_errors_refused(param: str | None) -> Iterator[None]:
    """Turn load errors into refusals of the field `param`."""
    try:
        yield
    except InvalidParams as error:
        raise BadRequest(str(error), param=f"{param}.params") from error
    except ProcessorLoadError as error:
        raise BadRequest(str(error), param=param) from error
    except ProcessorNotAllowed as error:
        raise Forbidden(str(error), param=param) from error
    except (ProcessorCacheFull, PreparationUnavailable) as error:
        raise ServiceUnavailable(str(error), param=param) from error
