"""The OpenAPI document. Bodies are read raw, so FastAPI has to be told of their schemas."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from .schema import RequestModel

_REFERENCE = "#/components/schemas/{model}"


def body_of(model: type[RequestModel]) -> dict[str, Any]:
    """A route's `openapi_extra`: its JSON body."""
    return json_body({"$ref": _REFERENCE.format(model=model.__name__)})


def json_body(schema: dict[str, Any]) -> dict[str, Any]:
    """The same for a body that has no model but this JSON schema."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_schemas(document: dict[str, Any], models: list[type[RequestModel]]) -> None:
    """Put what the references of `body_of` point to into an OpenAPI document."""
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=_REFERENCE)
    document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
