"""Descriptions of shipped classes, which sandboxes send to the server."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import orjson

from logitship.client.author_errors import class_name
from logitship.client.errors import ProcessorLoadError
from logitship.client.params_schema import MAX_SCHEMA_BYTES
from logitship.client.scrub import scrub

_MAX_NAME_LENGTH = 200
_MAX_DESCRIPTION = 1000


@dataclass(frozen=True)
class ClassDescription:
    """Name, docstring and parameter schema of a processor class.

    Attributes:
        name: name of the class.
        description: first paragraph of its own docstring, on one line; "" if it has none.
        params_schema: its `params_schema`; None if it has none.
        dense_reason: why it cannot be called before its logits exist; "" if it can.
    """

    name: str
    description: str = ""
    params_schema: dict[str, Any] | None = None
    dense_reason: str = ""


def describe(cls: type) -> ClassDescription:
    """Describe a class. Its metaclass may be the author's code: this call may raise anything.

    Raises:
        ProcessorLoadError: `params_schema` is not a JSON object of at most 32 KiB, so that it could not be enforced.
    """
    return _sanitized(class_name(cls), own_summary(cls), _json_object(getattr(cls, "params_schema", None)))


def own_summary(cls: type) -> str:
    """Return the first paragraph of a class's own docstring; "" if it has none."""
    doc = vars(cls).get("__doc__")  # `cls.__doc__` would be the base class's
    return " ".join(inspect.cleandoc(doc).partition("\n\n")[0].split()) if isinstance(doc, str) else ""


def to_bytes(description: ClassDescription) -> bytes:
    """Serialize a description for `from_bytes`."""
    return orjson.dumps(
        [description.name, description.description, description.params_schema, description.dense_reason]
    )


def from_bytes(body: bytes) -> ClassDescription:
    """Deserialize a description from an untrusted process.

    Raises:
        ValueError: the bytes are not in the format of `to_bytes`.
    """
    match orjson.loads(body):  # its error is a ValueError too
        case [str(name), str(description), dict() | None as schema, str(dense_reason)]:
            return _sanitized(name, description, schema, dense_reason)
    raise ValueError("not a class description")


def _sanitized(name: str, description: str, schema: dict[str, Any] | None, dense_reason: str = "") -> ClassDescription:
    return ClassDescription(
        "".join(scrub(name).split())[:_MAX_NAME_LENGTH] or "?",
        " ".join(scrub(description).split())[:_MAX_DESCRIPTION],
        schema,
        " ".join(scrub(dense_reason).split())[:_MAX_DESCRIPTION],
    )


def _json_object(value: Any) -> dict[str, Any] | None:
    """Return a copy of a class's `params_schema` that is made of plain JSON values."""
    if value is None:
        return None
    try:
        text = orjson.dumps(value)
    except orjson.JSONEncodeError:
        text = b"null"
    copy = orjson.loads(text) if len(text) <= MAX_SCHEMA_BYTES else None
    if not isinstance(copy, dict):
        raise ProcessorLoadError(f"params_schema is not a JSON object of at most {MAX_SCHEMA_BYTES} bytes")
    return copy
