"""Schemas whose fields have examples in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


class Documented(BaseModel):
    """A JSON object. Docstrings of its fields are their descriptions."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    examples: ClassVar[Mapping[str, object]] = {}
    """An example of each field, by its name in JSON. Those of base classes count too."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The JSON schema, with the examples."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for base in reversed(cls.__mro__):
            for name, example in vars(base).get("examples", {}).items():
                properties[name]["examples"] = [example]
        return schema


ABSENT: Any = Field(default=None)
"""The default of a field of an `AnswerModel` that some answers have not. It is never null for that."""


class AnswerModel(Documented):
    """A JSON object in an answer. It is only there for the document: answers are not made of it.

    `examples` is one example of the whole object.
    """

    model_config = ConfigDict(extra="forbid")

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The JSON schema, without the defaults: an answer has a field, or has not."""
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        resolved = handler.resolve_ref_schema(schema)
        for field in resolved["properties"].values():
            field.pop("default", None)
        return schema
