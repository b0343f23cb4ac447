"""What an installed processor has beyond a shipped one: a name, a schema, and a check of its parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from logitship.client.processor import CustomLogitProcessor


class BuiltinProcessor(CustomLogitProcessor):
    """A row-level processor that a request can ask for by name, without shipping code."""

    name: ClassVar[str]
    """What a request writes: `{"name": "<name>"}`."""
    params_schema: ClassVar[dict[str, Any]]
    """JSON Schema (draft 2020-12) of the request's `custom_params`. Token ids are below the vocabulary size besides."""

    @classmethod
    @abstractmethod
    def validate_params(cls, params: Mapping[str, Any] | None, *, vocab_size: int) -> None:
        """Check a request's `custom_params` at admission.

        Keys that the processor does not know are left alone: a request's processors share one `custom_params`.

        Raises:
            ValueError: names the parameter and says what was expected; the request is refused with this message.
        """
        raise NotImplementedError


def require_token_ids(params: Mapping[str, Any] | None, key: str, *, vocab_size: int) -> list[int]:
    """The list of token ids in `params[key]`.

    Raises:
        ValueError: it is missing, not a list, or one of its items is not a token of the vocabulary.
    """
    value = _required(params, key, "a list of token ids")
    if not isinstance(value, list):
        raise ValueError(f"{key}: expected a list of token ids, got {_shown(value)}")
    for item in value:
        if not _is_integer(item):
            raise ValueError(f"{key}: expected integers, got {_shown(item)}")
        if not 0 <= item < vocab_size:
            raise ValueError(f"{key}: token id {item} is outside the vocabulary (0 to {vocab_size - 1})")
    return value


def require_count(params: Mapping[str, Any] | None, key: str, *, expected: str) -> int:
    """The integer, 0 or greater, in `params[key]`.

    Raises:
        ValueError: it is missing, not an integer, or negative. The message says that `expected` was.
    """
    value = _required(params, key, expected)
    if not _is_integer(value) or value < 0:
        raise ValueError(f"{key}: expected {expected}, got {_shown(value)}")
    return int(value)


def _required(params: Mapping[str, Any] | None, key: str, expected: str) -> Any:
    # A processor without its parameter would do nothing, and a misspelt parameter would pass without a word.
    if params is None or key not in params:
        raise ValueError(f"{key}: missing from custom_params, expected {expected}")
    return params[key]


def _is_integer(value: Any) -> bool:
    # True and False are integers to Python, but not to JSON.
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
