"""The OpenAPI document. Bodies are read raw and answers are written raw, so FastAPI has to be told of their schemas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from logitship.server.schemas.response_schemas import ErrorResponse

_REFERENCE = "#/components/schemas/{model}"


def ref(model: type) -> dict[str, Any]:
    """A schema that refers to a model's. The model must be among those of `add_schemas`."""
    return {"$ref": _REFERENCE.format(model=model.__name__)}


def one_or_more(model: type) -> dict[str, Any]:
    """A schema for an object, or a list of them."""
    return {"oneOf": [ref(model), {"type": "array", "items": ref(model)}]}


def operation(
    *,
    body: type | dict[str, Any] | None = None,
    body_example: object = None,
    answer: type | dict[str, Any] | None = None,
    events: type | None = None,
    text: str | None = None,
    media_type: str = "text/plain",
) -> dict[str, Any]:
    """A route's `openapi_extra`: what it takes, and what it answers.

    Args:
        body: of its JSON body; a model, or a JSON schema with an example in it.
        body_example: a whole body, for a model.
        answer: of its JSON answer; None: it has none.
        events: of the data of its server-sent events, if it streams.
        text: an example of its answer, if that is text.
        media_type: of that text.
    """
    content = _json(answer)
    if events is not None:
        content["text/event-stream"] = {"schema": _event_stream(events)}
    if text is not None:
        content[media_type] = {"schema": {"type": "string", "examples": [text]}}
    error = {"content": _json(ErrorResponse)}
    extra: dict[str, Any] = {
        "responses": {
            "200": {"description": "Done.", "content": content},
            "4XX": {"description": "The request is at fault.", **error},
            "5XX": {"description": "The server is at fault, or has no room.", **error},
        }
    }
    if body is not None:
        taken = _json(body)
        if body_example is not None:
            taken["application/json"]["example"] = body_example
        extra["requestBody"] = {"required": True, "content": taken}
    return extra


def _json(of: type | dict[str, Any] | None) -> dict[str, Any]:
    """Content that is JSON with this schema; None: there is none."""
    return {} if of is None else {"application/json": {"schema": of if isinstance(of, dict) else ref(of)}}


def _event_stream(events: type) -> dict[str, Any]:
    return {
        "type": "string",
        "description": f"With `stream`: lines `data: …`, each with a JSON object as `{events.__name__}` has it, or "
        "with an error; then `data: [DONE]`.",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [ref(events), ref(ErrorResponse)]},
    }


def complete(document: dict[str, Any], models: Sequence[type]) -> None:
    """Put what the references point to into an OpenAPI document, and take out what is not so.

    Args:
        models: those that are referred to, with what they refer to.
    """
    _, definitions = TypeAdapter.json_schemas(
        [(model, "validation", TypeAdapter(model)) for model in models], ref_template=_REFERENCE
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions["$defs"])
    for route in document["paths"].values():
        for each in route.values():
            # FastAPI's: a parameter's mistake is a 404 here, and an answer without a schema may be anything.
            each["responses"].pop("422", None)
            if not each["responses"]["200"].get("content", {}).get("application/json", {"schema": True})["schema"]:
                del each["responses"]["200"]["content"]["application/json"]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
