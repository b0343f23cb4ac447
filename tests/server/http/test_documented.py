from __future__ import annotations

from typing import Any, ClassVar

from logitship.server.schemas.documented import ABSENT, AnswerModel, Documented


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


class Answer(AnswerModel):
    examples: ClassVar = {"a": 1, "b": None, "c": 2}

    a: int
    """The first."""
    b: int | None
    """The second."""
    c: int = ABSENT
    """The third."""


def properties(model: type[Documented]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = model.model_json_schema()["properties"]
    return found


def test_examples_of_base_classes_count_and_give_way() -> None:
    assert {name: field["examples"] for name, field in properties(Derived).items()} == {"a": [1], "b": [3], "c": [4]}
    assert properties(Base)["b"]["examples"] == [2]
    assert properties(Derived)["a"]["description"] == "The first."


def test_a_field_that_some_answers_have_not_is_never_null() -> None:
    schema = Answer.model_json_schema()
    assert schema["required"] == ["a", "b"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["c"]["type"] == "integer"
    assert "default" not in schema["properties"]["c"]
    assert "anyOf" in schema["properties"]["b"]
