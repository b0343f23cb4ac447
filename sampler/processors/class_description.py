"""Description of a processor class, and its serialization for sandboxes."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import orjson

from logitship.client.author_errors import class_name
from logitship.client.scrub import scrub

_LONGEST_NAME = 200
_LONGEST_DESCRIPTION = 1000
_LONGEST_SCHEMA = 1 << 15
"""Bytes of JSON. Longer schemas are dropped, so that a description fits into a sandbox's reply."""


@dataclass(frozen=True)
class ClassDescription:
    """Name, docstring and parameter schema of a processor class.

    Attributes:
        name: name of the class.
        description: first paragraph of its own docstring, on one line; "" if it has none.
        params_schema: its `params_schema`; None if it has none, or if that is not a JSON object of at most 32 KiB.
    """

    name: str
    description: str = ""
    params_schema: dict[str, Any] | None = None


def describe(cls: type) -> ClassDescription:
    """Describe a class. Its metaclass may be the author's code: this call may raise anything."""
    doc = vars(cls).get("__doc__")  # `cls.__doc__` would be the base class's
    paragraph = inspect.cleandoc(doc).partition("\n\n")[0] if isinstance(doc, str) else ""
    return _sanitized(class_name(cls), paragraph, _json_object(getattr(cls, "params_schema", None)))


def to_bytes(description: ClassDescription) -> bytes:
    """Serialize a description for `from_bytes`."""
    return orjson.dumps([description.name, description.description, description.params_schema])


def from_bytes(body: bytes) -> ClassDescription:
    """Deserialize a description from an untrusted process.

    Raises:
        ValueError: the bytes are not in the format of `to_bytes`.
    """
    match orjson.loads(body):  # its error is a ValueError too
        case [str(name), str(description), dict() | None as schema]:
            return _sanitized(name, description, schema)
    raise ValueError("not a class description")


def _sanitized(name: str, description: str, schema: dict[str, Any] | None) -> ClassDescription:
    return ClassDescription(
        "".join(scrub(name).split())[:_LONGEST_NAME] or "?",
        " ".join(scrub(description).split())[:_LONGEST_DESCRIPTION],
        schema,
    )


def _json_object(value: Any) -> dict[str, Any] | None:
    """Return a copy made of plain JSON values; None if it is not a JSON object or is too long."""
    try:
        text = orjson.dumps(value)
    except orjson.JSONEncodeError:
        return None
    copy = orjson.loads(text) if len(text) <= _LONGEST_SCHEMA else None
    return copy if isinstance(copy, dict) else None
