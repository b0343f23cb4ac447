"""Schemas with descriptions and examples in the OpenAPI document: pydantic models and TypedDicts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, TypeAdapter, with_config
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from typing_extensions import get_original_bases

T = TypeVar("T")

SCHEMA_LOCK = threading.RLock()
"""Held while pydantic makes schemas. It parses the docstrings of TypedDicts with `ast`, which on Python 3.11 raises
`SystemError` when several threads parse at the same time."""


class Documented(BaseModel):
    """A JSON object. The docstrings of the fields become their descriptions."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    examples: ClassVar[Mapping[str, object]] = {}
    """An example per field, by its name in JSON. Includes those of base classes."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the JSON schema, with the examples."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for base in reversed(cls.__mro__):
            for name, example in vars(base).get("examples", {}).items():
                properties[name]["examples"] = [example]
        return schema


def documented(example: Mapping[str, object]) -> Callable[[type[T]], type[T]]:
    """Document a TypedDict, an object in a response. The docstrings of the keys become their descriptions.

    Args:
        example: example of the whole object; for a subclass, of the keys that it adds.
    """

    def decorate(cls: type[T]) -> type[T]:
        bases = [base for base in get_original_bases(cls) if base in _EXAMPLES]
        whole = {name: value for base in bases for name, value in _EXAMPLES[base].items()} | dict(example)
        _EXAMPLES[cls] = whole

        def add_examples(schema: dict[str, Any]) -> None:
            properties = schema["properties"]
            for base in bases:  # pydantic reads the docstrings of the class's own keys only
                for name, inherited in TypeAdapter(base).json_schema()["properties"].items():
                    properties[name].setdefault("description", inherited["description"])
            for name, value in whole.items():
                properties[name]["examples"] = [value]

        config = ConfigDict(extra="forbid", use_attribute_docstrings=True, json_schema_extra=add_examples)
        return with_config(config)(cls)

    return decorate


def example_of(cls: type) -> Mapping[str, object]:
    """Return the example of a TypedDict decorated with `documented`."""
    return _EXAMPLES[cls]


_EXAMPLES: dict[type, dict[str, object]] = {}
