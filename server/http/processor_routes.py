"""logitship's own routes: what is installed, and what is uploaded once and then named by name, version or digest."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response

from logitship.client.errors import ProcessorLoadError
from logitship.client.processor_info import ProcessorInfo
from logitship.client.serialization import processor_string
from logitship.client.serialization.processor_string import ProcessorString, RegisteredProcessor
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.processors.processor_names import NAME_RULE
from logitship.server.refusals import BadRequest
from logitship.server.schemas.processor_schemas import (
    PROCESSOR_SCHEMA,
    DeletedProcessor,
    ProcessorDetailsObject,
    ProcessorList,
    ProcessorObject,
)

from .admission import check_may_ship
from .auth import caller_of, check_key_may_ship
from .body import JSONResponse, read_bytes
from .documentation import operation

Name = Annotated[
    str | None,
    Query(description=f"What it goes by, instead of its class's name: {NAME_RULE}.", examples=["NoComma"]),
]
ProcessorId = Annotated[str, Path(description="Its name, its name and version, or its digest.", examples=["NoComma@2"])]


def processor_router(engine: AsyncEngine) -> APIRouter:
    """The routes, bound to `engine`."""
    router = APIRouter(prefix="/v1/processors", tags=["Processors"])

    @router.get("", openapi_extra=operation(answer=ProcessorList))
    async def processors(request: Request) -> Response:
        """The installed processors, and those registered with this API key, each with the schema of its parameters."""
        found = engine.processors.of(caller_of(request).tenant)
        return JSONResponse({"object": "list", "data": [_object(each) for each in found]})

    @router.post("", openapi_extra=operation(body=PROCESSOR_SCHEMA, answer=ProcessorObject))
    async def register(request: Request, name: Name = None) -> Response:
        """Upload a processor. Requests then carry `{"name": …}` or `{"digest": …}` instead.

        Another one under the same name becomes its next version. The same one again stays what it is.
        """
        _check_query(request)
        caller = caller_of(request)
        # Whatever it is: it takes room that others may want.
        check_key_may_ship(caller)
        string = _parse(await read_bytes(request, engine.config.max_processor_size))
        check_may_ship(engine, caller, string)
        return JSONResponse(_object(await engine.register(string, caller.tenant, name)))

    @router.get("/{id:path}", openapi_extra=operation(answer=ProcessorDetailsObject))
    async def processor(request: Request, id: ProcessorId) -> Response:
        """One processor with its source, by its name (the newest version), by `name@version`, or by its digest."""
        return JSONResponse(_object(engine.processors.details(id, caller_of(request).tenant)))

    @router.delete("/{id:path}", openapi_extra=operation(answer=DeletedProcessor))
    async def delete(request: Request, id: ProcessorId) -> Response:
        """Delete a registered version, or all versions of a name or a digest. Requests that run keep theirs."""
        ids = engine.processors.delete(id, caller_of(request).tenant)
        deleted: DeletedProcessor = {"id": id, "object": "processor", "deleted": True, "ids": ids}
        return JSONResponse(deleted)

    return router


def _object(info: ProcessorInfo) -> dict[str, Any]:
    return {"object": "processor", **asdict(info)}


def _check_query(request: Request) -> None:
    """A misspelt `name` would register the processor under another one."""
    keys = [key for key, _ in request.query_params.multi_items()]
    if unknown := [key for key in keys if key != "name"]:
        raise BadRequest(f"{unknown[0][:80]}: is no query parameter: this route takes name", param=unknown[0][:80])
    if len(keys) > 1:
        raise BadRequest("name: is given more than once", param="name")


def _parse(body: bytes) -> ProcessorString:
    try:
        string = processor_string.parse(body)
    except ProcessorLoadError as error:
        raise BadRequest(str(error)) from None
    if isinstance(string, RegisteredProcessor):
        raise BadRequest("a digest says what was registered before: upload the processor itself", param="digest")
    return string
