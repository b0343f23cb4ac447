"""Schemas for the OpenAPI document. The routes read and write raw bodies, so FastAPI cannot infer them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from .documented import SCHEMA_LOCK
from .response_schemas import ErrorResponse

_REFERENCE = "#/components/schemas/{model}"


BINARY: dict[str, Any] = {"type": "string", "format": "binary", "description": "The bytes.", "examples": ["…"]}
"""Schema of a body of bytes."""


def ref(model: type) -> dict[str, Any]:
    """Return a reference to the schema of `model`, which must be among the models given to `complete`."""
    return {"$ref": _REFERENCE.format(model=model.__name__)}


def one_or_more(model: type) -> dict[str, Any]:
    """Return the schema of an object or a list of such objects."""
    return {"oneOf": [ref(model), {"type": "array", "items": ref(model)}]}


def operation(
    *,
    body: type | dict[str, Any] | None = None,
    body_type: str = "application/json",
    body_example: object = None,
    response: type | dict[str, Any] | None = None,
    stream: type | None = None,
    text: str | None = None,
    media_type: str = "text/plain",
) -> dict[str, Any]:
    """Build the `openapi_extra` of a route.

    Args:
        body: schema of the request body: a model, or a JSON schema that includes an example.
        body_type: media type of the request body.
        body_example: example of a whole body, if `body` is a model.
        response: schema of the JSON response; None: no JSON response.
        stream: schema of the data of server-sent events, if the route streams.
        text: example of the response, if it is text.
        media_type: media type of `text`.
    """
    content = _json(response)
    if stream is not None:
        content["text/event-stream"] = {"schema": _event_stream(stream)}
    if text is not None:
        content[media_type] = {"schema": {"type": "string", "examples": [text]}}
    error = {"content": _json(ErrorResponse)}
    extra: dict[str, Any] = {
        "responses": {
            "200": {"description": "Success.", "content": content},
            "4XX": {"description": "The request is invalid or not permitted.", **error},
            "5XX": {"description": "The server failed, or is at capacity.", **error},
        }
    }
    if body is not None:
        taken = {body_type: _json(body)["application/json"]}
        if body_example is not None:
            taken[body_type]["example"] = body_example
        extra["requestBody"] = {"required": True, "content": taken}
    return extra


def _json(of: type | dict[str, Any] | None) -> dict[str, Any]:
    """Build the content for JSON with this schema; empty for None."""
    return {} if of is None else {"application/json": {"schema": of if isinstance(of, dict) else ref(of)}}


def _event_stream(events: type) -> dict[str, Any]:
    return {
        "type": "string",
        "description": f"With `stream`: lines `data: …`, each with a `{events.__name__}` object or an error; then "
        "`data: [DONE]`.",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [ref(events), ref(ErrorResponse)]},
    }


def complete(document: dict[str, Any], models: Sequence[type]) -> None:
    """Add the referenced schemas to an OpenAPI document, and remove FastAPI's guesses that are wrong here.

    Args:
        document: the OpenAPI document, changed in place.
        models: the referenced models. The models that they refer to are added as well.
    """
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(_definitions(tuple(models)))
    for route in document["paths"].values():
        for each in route.values():
            # An invalid parameter is a 400 or 404 here, not FastAPI's 422.
            each["responses"].pop("422", None)
            # An empty schema would allow any JSON response.
            if not each["responses"]["200"].get("content", {}).get("application/json", {"schema": True})["schema"]:
                del each["responses"]["200"]["content"]["application/json"]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)


@functools.cache  # takes a second
def _definitions(models: tuple[type, ...]) -> dict[str, Any]:
    """Return the schemas of `models`, and of those that they refer to, by name."""
    with SCHEMA_LOCK:
        _, schemas = TypeAdapter.json_schemas(
            [(model, "validation", TypeAdapter(model)) for model in models], ref_template=_REFERENCE
        )
    definitions: dict[str, Any] = schemas["$defs"]
    return definitions
