"""What a processor's class says of itself, and how that travels out of a sandbox."""

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
"""Bytes of JSON. Longer ones stay where they are, so that the whole fits into an answer of a sandbox."""


@dataclass(frozen=True)
class ClassDescription:
    """What a class says of itself.

    Attributes:
        name: its name.
        description: the first paragraph of its own docstring, on one line; "" if it has none.
        params_schema: its `params_schema`; None if it has none, or one that is no JSON object or over 32 KiB.
    """

    name: str
    description: str = ""
    params_schema: dict[str, Any] | None = None


def describe(cls: type) -> ClassDescription:
    """Ask a class. Its metaclass may be the author's code: this is author's code too, and may raise anything."""
    doc = vars(cls).get("__doc__")  # `cls.__doc__` would be the base class's
    paragraph = inspect.cleandoc(doc).partition("\n\n")[0] if isinstance(doc, str) else ""
    return _tame(class_name(cls), paragraph, _json_object(getattr(cls, "params_schema", None)))


def to_bytes(description: ClassDescription) -> bytes:
    """For `from_bytes`."""
    return orjson.dumps([description.name, description.description, description.params_schema])


def from_bytes(body: bytes) -> ClassDescription:
    """What somebody else, who may lie, says of a class.

    Raises:
        ValueError: it is not what `to_bytes` makes.
    """
    match orjson.loads(body):  # its error is a ValueError too
        case [str(name), str(description), dict() | None as schema]:
            return _tame(name, description, schema)
    raise ValueError("no description of a class")


def _tame(name: str, description: str, schema: dict[str, Any] | None) -> ClassDescription:
    return ClassDescription(
        "".join(scrub(name).split())[:_LONGEST_NAME] or "?",
        " ".join(scrub(description).split())[:_LONGEST_DESCRIPTION],
        schema,
    )


def _json_object(value: Any) -> dict[str, Any] | None:
    """A copy of it, as plain as what JSON gives."""
    try:
        text = orjson.dumps(value)
    except orjson.JSONEncodeError:
        return None
    copy = orjson.loads(text) if len(text) <= _LONGEST_SCHEMA else None
    return copy if isinstance(copy, dict) else None
