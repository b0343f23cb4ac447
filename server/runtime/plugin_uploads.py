"""`/v1/processors` and `/v1/artifacts` on the HTTP server of another engine.

Imported late: engines configure `prometheus_client` and FastAPI before plugins import them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from logitship.client.processor_info import ProcessorInfo
from logitship.client.serialization.processor_string import ProcessorString
from logitship.server.api_keys import Caller
from logitship.server.config import ServerConfig
from logitship.server.processors.uploaded_processors import UploadedProcessors
from logitship.server.refusals import RequestRefused, ServiceUnavailable, ThreadUnavailable
from logitship.server.requests.body_limits import QueuedBytes
from logitship.server.requests.fair_pool import FairPool, pool_threads
from logitship.server.uploads.artifact_routes import artifact_router
from logitship.server.uploads.content_type import check_content_type
from logitship.server.uploads.processor_routes import processor_router
from logitship.server.uploads.refusal_responses import CLIENT_CLOSED_REQUEST, response_to

from .plugin_processors import PluginProcessors
from .plugin_settings import PluginSettings

_MAX_WAITING = 64
"""Most uploads of a tenant that wait for a thread."""


class PluginUploads:
    """The uploads to another engine. Implements `UploadEngine`.

    Args:
        settings: the plugin's.
        prepare: returns the processors of this front end, which may take seconds.
    """

    def __init__(self, settings: PluginSettings, prepare: Callable[[], PluginProcessors]) -> None:
        self.config = settings
        self.pool = FairPool(pool_threads(), _MAX_WAITING, "logitship-work")
        self.queued_bytes = QueuedBytes(ServerConfig.max_queued_bytes, ServerConfig.max_queued_bytes // 2)
        self._prepare = prepare
        self._processors: UploadedProcessors | None = None

    async def wait_until_ready(self) -> None:
        """Wait until the processors can be loaded.

        Raises:
            ServiceUnavailable: they cannot.
        """
        if self._processors is None:
            try:
                self._processors = (await asyncio.to_thread(self._prepare)).uploaded(self.pool)
            except ValueError as error:
                raise ServiceUnavailable(str(error)) from None
            except RuntimeError:
                raise ThreadUnavailable from None

    @property
    def processors(self) -> UploadedProcessors:
        """The processors that requests can name."""
        assert self._processors is not None
        return self._processors

    @property
    def shipping_is_off(self) -> str | None:
        """Reason why requests may not ship code; None: they may."""
        return self.config.shipping_is_off

    async def register(self, string: ProcessorString, tenant: str = "", name: str | None = None) -> ProcessorInfo:
        """See `UploadedProcessors.register`."""
        return await self.processors.register(string, tenant, name)


def add_upload_routes(
    app: FastAPI,
    settings: PluginSettings,
    prepare: Callable[[], PluginProcessors],
    find_caller: Callable[[Request], Caller],
) -> None:
    """Add the routes to an engine's application, behind the authentication that it has.

    Args:
        app: the application, which has not served a request.
        settings: the plugin's.
        prepare: see `PluginUploads`.
        find_caller: returns the client that sent a request.
    """
    uploads = PluginUploads(settings, prepare)

    async def identify(request: Request) -> None:
        if request.method == "POST":
            check_content_type(request.scope["route"].path, request.headers)
        request.state.caller = find_caller(request)
        await uploads.wait_until_ready()

    class UploadRoute(APIRoute):
        """A route that handles its errors itself: vLLM's application does not call handlers that are added later."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def answer(request: Request) -> Response:
                try:
                    return await handle(request)
                except RequestRefused as refused:
                    refused.message = settings.in_own_words(refused.message)
                    return response_to(refused)
                except ClientDisconnect:
                    return Response(status_code=CLIENT_CLOSED_REQUEST)

            return answer

    for router in (processor_router(uploads, UploadRoute), artifact_router(uploads, UploadRoute)):
        app.include_router(router, dependencies=[Depends(identify)], include_in_schema=False)
