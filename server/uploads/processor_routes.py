"""`/v1/processors`: list, register, show and delete the processors that requests can name."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.routing import APIRoute

from logitship.client.errors import ProcessorLoadError
from logitship.client.processor_info import ProcessorDetails, ProcessorInfo
from logitship.client.serialization import processor_string
from logitship.client.serialization.processor_string import ProcessorString, RegisteredProcessor
from logitship.server.processors.processor_names import NAME_RULE
from logitship.server.processors.request_processors import check_processor_text
from logitship.server.refusals import BadRequest
from logitship.server.schemas.documentation import operation
from logitship.server.schemas.processor_schemas import (
    PROCESSOR_SCHEMA,
    DeletedProcessor,
    ProcessorDetailsObject,
    ProcessorForm,
    ProcessorList,
    ProcessorObject,
)

from .refusal_responses import JSONResponse
from .request_bodies import received_processor
from .upload_engine import UploadEngine, caller_of, check_key_may_ship, check_may_ship

Name = Annotated[
    str | None,
    Query(description=f"Name to register it under; default: its class's name. {NAME_RULE}.", examples=["NoComma"]),
]
ProcessorId = Annotated[str, Path(description="A name, a name with version, or a digest.", examples=["NoComma@2"])]


def processor_router(engine: UploadEngine, route_class: type[APIRoute] = APIRoute) -> APIRouter:
    """Create the routes for `engine`, of a class that may handle their errors."""
    router = APIRouter(prefix="/v1/processors", tags=["Processors"], route_class=route_class)

    @router.get("", openapi_extra=operation(response=ProcessorList))
    async def processors(request: Request) -> Response:
        """List the installed processors and those registered with this API key, with their parameters' schemas."""
        found = engine.processors.list_all(caller_of(request).tenant)
        body: ProcessorList = {"object": "list", "data": [_processor_object(each) for each in found]}
        return JSONResponse(body)

    @router.post("", openapi_extra=operation(body=PROCESSOR_SCHEMA, response=ProcessorObject))
    async def register(request: Request, name: Name = None) -> Response:
        """Register a processor. Requests then send `{"name": …}` or `{"digest": …}` instead of its code.

        A different processor under the same name becomes the next version. Registering the same one again is a no-op.
        """
        _check_query(request)
        caller = caller_of(request)
        # Even an installed processor: a registration takes up capacity.
        check_key_may_ship(caller)
        async with received_processor(request, engine, _parse) as body:
            check_may_ship(engine, caller, body.value)
            return JSONResponse(_processor_object(await engine.register(body.value, caller.tenant, name)))

    @router.get("/{id:path}", openapi_extra=operation(response=ProcessorDetailsObject))
    async def processor(request: Request, id: ProcessorId) -> Response:
        """Show a processor with its source, by name (the newest version), by `name@version`, or by digest."""
        return JSONResponse(_details_object(engine.processors.details(id, caller_of(request).tenant)))

    @router.delete("/{id:path}", openapi_extra=operation(response=DeletedProcessor))
    async def delete(request: Request, id: ProcessorId) -> Response:
        """Delete a registered version, or all versions of a name or a digest. Running requests are not affected."""
        ids = engine.processors.delete(id, caller_of(request).tenant)
        deleted: DeletedProcessor = {"id": id, "object": "processor", "deleted": True, "ids": ids}
        return JSONResponse(deleted)

    return router


def _processor_object(info: ProcessorInfo) -> ProcessorObject:
    return {
        "object": "processor",
        "id": info.id,
        "kind": info.kind,
        "name": info.name,
        "version": info.version,
        "digest": info.digest,
        "description": info.description,
        "params_schema": None if info.params_schema is None else dict(info.params_schema),
        "is_mask": info.is_mask,
        "form": cast("ProcessorForm | None", info.form),
        "python": info.python,
        "size": info.size,
        "created": info.created,
    }


def _details_object(info: ProcessorDetails) -> ProcessorDetailsObject:
    return {
        **_processor_object(info),
        "source": info.source,
        "class_name": info.class_name,
        "source_note": info.source_note,
    }


def _check_query(request: Request) -> None:
    """Refuse unknown parameters: a misspelt `name` would register the processor under its class's name."""
    keys = [key for key, _ in request.query_params.multi_items()]
    if unknown := [key for key in keys if key != "name"]:
        raise BadRequest(f"{unknown[0][:80]}: unknown query parameter: this route has only name", param=unknown[0][:80])
    if len(keys) > 1:
        raise BadRequest("name: is given more than once: leave one out", param="name")


def _parse(body: bytes) -> ProcessorString:
    check_processor_text(body)
    try:
        string = processor_string.parse(body)
    except ProcessorLoadError as error:
        raise BadRequest(str(error)) from None
    if isinstance(string, RegisteredProcessor):
        raise BadRequest("a digest names a registered processor: upload the processor itself", param="digest")
    return string
