"""The interface between the routes of uploads and an engine, and who may upload."""

from __future__ import annotations

from typing import Protocol

from fastapi import Request

from logitship.client.processor_info import ProcessorInfo
from logitship.client.serialization.processor_string import InstalledProcessor, ProcessorString, RegisteredProcessor
from logitship.server.api_keys import Caller
from logitship.server.processors.uploaded_processors import UploadedProcessors
from logitship.server.refusals import BadRequest, Forbidden
from logitship.server.requests.body_limits import QueuedBytes
from logitship.server.requests.fair_pool import FairPool


class UploadLimits(Protocol):
    """Limits of uploads: those of `ServerConfig`, or of a plugin."""

    @property
    def max_processor_size(self) -> int:
        """Longest processor string, in bytes."""
        ...

    @property
    def max_artifact_size(self) -> int:
        """Largest artifact, in bytes."""
        ...

    @property
    def request_body_timeout(self) -> float:
        """Seconds in which a body has to arrive."""
        ...


class UploadEngine(Protocol):
    """An engine whose clients register processors and upload artifacts."""

    @property
    def config(self) -> UploadLimits:
        """The limits."""
        ...

    @property
    def pool(self) -> FairPool:
        """Threads for the CPU work of requests."""
        ...

    @property
    def queued_bytes(self) -> QueuedBytes:
        """Memory of the bodies that are being read."""
        ...

    @property
    def processors(self) -> UploadedProcessors:
        """The processors that requests can name."""
        ...

    @property
    def shipping_is_off(self) -> str | None:
        """Reason why requests may not ship code; None: they may."""
        ...

    async def register(self, string: ProcessorString, tenant: str = "", name: str | None = None) -> ProcessorInfo:
        """Keep a processor of a tenant, for requests that name it, see `UploadedProcessors.register`."""
        ...


def caller_of(request: Request) -> Caller:
    """Return the caller of an authenticated request."""
    caller = request.scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


def check_key_may_ship(caller: Caller, at: str | None = None) -> None:
    """Refuse code from a caller whose key may only generate.

    Args:
        caller: the caller.
        at: path of the code in the request body; None: the whole body.

    Raises:
        Forbidden: names the flag for keys that may ship.
    """
    if not caller.may_ship:
        raise Forbidden(
            "this API key may generate, but not ship processors: use a key that the server's operator set with "
            "--shipping-api-key, or name an installed processor, or a registered one by its digest",
            param=at,
        )


def check_may_ship(engine: UploadEngine, caller: Caller, string: ProcessorString, at: str | None = None) -> None:
    """Refuse shipped code that the server, or this API key, does not permit.

    Raises:
        BadRequest: with SGLang's message.
        Forbidden: other API keys may ship code, this one may not.
    """
    if not engine.processors.ships_code(string, caller.tenant):
        return
    if engine.shipping_is_off is not None:
        raise BadRequest(engine.shipping_is_off, param=at)
    # A digest or a name contains no code: a permitted key has shipped the processor before.
    if not isinstance(string, RegisteredProcessor | InstalledProcessor):
        check_key_may_ship(caller, at)
