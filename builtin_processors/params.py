"""Parameters of installed processors: pydantic models with error messages that state what was expected."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, ValidationInfo
from pydantic_core import ErrorDetails


class ModelFacts(Protocol):
    """Properties of the model that a processor can read: a `ModelView`, or a request's `__req__`."""

    @property
    def vocab_size(self) -> int:
        """Number of columns of the logits."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int] | set[int]:
        """The model's EOS tokens."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        ...


class PreparationUnavailable(Exception):
    """The server cannot prepare a request at the moment, through no fault of the request. It may be retried."""


@dataclass(frozen=True)
class Expects:
    """Metadata of a field's type: a description of valid values, which follows "expected" in error messages."""

    words: str


class ProcessorParams(BaseModel):
    """A request's parameters for an installed processor. Values are not converted: `"5"` is not a number.

    A field's type is annotated with `Expects`. Validators that depend on the vocabulary use `model_of`.
    """

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )

    @classmethod
    def read(cls, params: Mapping[str, Any] | None, model: ModelFacts) -> Self:
        """Validate a request's `custom_params`.

        Unknown keys are ignored, because a request's processors share one `custom_params`.

        Raises:
            ValueError: a parameter is invalid; names it and says what was expected.
        """
        given = {name: params[name] for name in cls.model_fields if name in params} if params else {}
        try:
            return cls.model_validate(given, context={"model": model})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
        raise ValueError(cls._explained(first))

    @classmethod
    def as_json_schema(cls) -> dict[str, Any]:
        """Return the JSON Schema (draft 2020-12)."""
        return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | cls.model_json_schema()

    @classmethod
    def _explained(cls, error: Any) -> str:
        location, reason = error["loc"], plain_reason(error)
        if not location:
            return str(reason)
        name = str(location[0])
        words = next((each.words for each in cls.model_fields[name].metadata if isinstance(each, Expects)), None)
        if error["type"] == "missing":
            # Not ignored: with a missing or misspelled parameter, a processor would silently do nothing.
            return f"{name}: missing from custom_params" + (f", expected {words}" if words else "")
        if error["type"] != "value_error":
            reason = f"{f'expected {words}' if words else reason}, got {shown(error['input'])}"
        return f"{name}: {reason}"


_REASONS = {
    "missing": "is missing",
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "list_type": "must be a list",
    "string_type": "must be a string",
    "tuple_type": "must be a list",
}
"""The reasons of pydantic's errors in the words of JSON, by the error's type."""


def plain_reason(error: ErrorDetails) -> str:
    """Return the reason of an error of pydantic, in the words of the other messages."""
    reason = error["msg"].removeprefix("Value error, ")
    return _REASONS.get(error["type"], re.sub("^Input should be ", "must be ", reason))


def model_of(info: ValidationInfo) -> ModelFacts:
    """Return the model, in a validator."""
    model: ModelFacts = info.context["model"]  # type: ignore[index]  # set by `read`
    return model


def shown(value: Any) -> str:
    """Return the repr of a value for an error message, truncated."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_token_ids(value: Any, info: ValidationInfo) -> list[int]:
    """Check that a value is a list of token ids.

    Raises:
        ValueError: it is not a list, or an item is not in the vocabulary.
    """
    if not isinstance(value, list):
        raise ValueError(f"expected a list of token ids, got {shown(value)}")
    vocab_size = model_of(info).vocab_size
    for item in value:
        # True and False are integers in Python, but not in JSON.
        if not isinstance(item, int) or isinstance(item, bool):
            raise ValueError(f"expected integers, got {shown(item)}")
        if not 0 <= item < vocab_size:
            raise ValueError(f"token id {item} is outside the vocabulary (0 to {vocab_size - 1})")
    return value


Count = Annotated[int, Field(ge=0), Expects("an integer, 0 or greater")]
TokenIds = Annotated[
    list[int],
    PlainValidator(check_token_ids, json_schema_input_type=list[Annotated[int, Field(ge=0)]]),
    Expects("a list of token ids"),
]
