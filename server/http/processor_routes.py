"""logitship's own routes: the installed processors, and those that are uploaded once and then named by their digest."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response

from logitship.client import processor_string
from logitship.client.errors import ProcessorLoadError
from logitship.client.processor_string import ProcessorString, RegisteredProcessor
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.errors import BadRequest

from .admission import check_may_ship
from .auth import caller_of, check_key_may_ship
from .body import JSONResponse, read_bytes
from .documentation import json_body

PROCESSOR_SCHEMA: dict[str, Any] = {
    "title": "Processor",
    "oneOf": [
        {
            "title": "Pickled",
            "type": "object",
            "properties": {
                "callable": {"type": "string", "description": "dill pickle of the class, in hexadecimal digits."},
                "logitship": {"type": "object", "description": "What `to_str()` says of it."},
            },
            "required": ["callable"],
        },
        {
            "title": "Source",
            "type": "object",
            "properties": {
                "source": {"type": "string", "description": "Text of a Python module that defines the class."},
                "class_name": {"type": "string", "description": "Which class of it is the processor."},
            },
            "required": ["source", "class_name"],
        },
    ],
}


def processor_router(engine: AsyncEngine) -> APIRouter:
    """The routes, bound to `engine`."""
    router = APIRouter(prefix="/v1/processors", tags=["Processors"])

    @router.get("")
    async def installed() -> Response:
        """The processors that a request can ask for by name, with the JSON Schema of their parameters."""
        return JSONResponse({"object": "list", "data": [asdict(each) for each in engine.installed_processors()]})

    @router.post("", openapi_extra=json_body(PROCESSOR_SCHEMA))
    async def register(request: Request) -> Response:
        """Upload a processor. Requests then carry `{"digest": …}` instead. Doing it again changes nothing."""
        caller = caller_of(request)
        # Whatever it is: the least recently used string makes way for it, which may be another's.
        check_key_may_ship(caller)
        string = _parse(await read_bytes(request, engine.config.max_processor_size))
        check_may_ship(engine, caller, string)
        digest, name = await engine.register(string, caller.tenant)
        return JSONResponse({"digest": digest, "name": name})

    return router


def _parse(body: bytes) -> ProcessorString:
    try:
        string = processor_string.parse(body)
    except ProcessorLoadError as error:
        raise BadRequest(str(error)) from None
    if isinstance(string, RegisteredProcessor):
        raise BadRequest("a digest says what was registered before: upload the processor itself", param="digest")
    return string
