from __future__ import annotations

from typing import Any, ClassVar, NotRequired

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from logitship.server.schemas.documented import Documented, documented, example_of


class Base(Documented):
    examples: ClassVar = {"a": 1, "b": 2}

    a: int
    """The first."""
    b: int = 5
    """The second."""


class Derived(Base):
    examples: ClassVar = {"b": 3, "c": 4}

    c: int | None = None
    """The third."""


@documented({"a": 1, "b": None})
class Response(TypedDict):
    """A response."""

    a: int
    """The first."""
    b: int | None
    """The second."""


@documented({"b": 2, "c": 3})
class LongResponse(Response):
    """A longer one."""

    c: NotRequired[int]
    """The third."""


def schema_of(cls: type) -> dict[str, Any]:
    return TypeAdapter(cls).json_schema()


def properties(cls: type) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = schema_of(cls)["properties"]
    return found


def test_model_inherits_and_overrides_examples() -> None:
    assert {name: field["examples"] for name, field in properties(Derived).items()} == {"a": [1], "b": [3], "c": [4]}
    assert properties(Base)["b"]["examples"] == [2]
    assert properties(Derived)["a"]["description"] == "The first."


def test_typed_dict_inherits_and_overrides_examples() -> None:
    assert example_of(LongResponse) == {"a": 1, "b": 2, "c": 3}
    found = properties(LongResponse)
    assert {name: field["examples"] for name, field in found.items()} == {"a": [1], "b": [2], "c": [3]}
    assert properties(Response)["b"]["examples"] == [None]


def test_typed_dict_inherits_descriptions() -> None:
    found = properties(LongResponse)
    assert {name: field["description"] for name, field in found.items()} == {
        "a": "The first.",
        "b": "The second.",
        "c": "The third.",
    }
    assert schema_of(LongResponse)["description"] == "A longer one."


def test_optional_key_is_not_nullable() -> None:
    schema = schema_of(LongResponse)
    assert schema["required"] == ["a", "b"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["c"]["type"] == "integer"
    assert "default" not in schema["properties"]["c"]
    assert "anyOf" in schema["properties"]["b"]
