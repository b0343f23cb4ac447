"""Markers between the parts of an output, such as the end of thinking."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import Field, PlainValidator, ValidationInfo

from logitship.builtin_processors.params import Expects, check_token_ids, model_of, shown

from .text_tokens import MAX_TEXT_TOKENS, check_length, read_phrase


def check_marker_ids(value: Any, info: ValidationInfo) -> list[int]:
    """Check a marker given as token ids.

    Raises:
        ValueError: it is not a list of tokens of the vocabulary, or too long.
    """
    if isinstance(value, list):
        check_length(value)
    return check_token_ids(value, info)


def read_marker(value: Any, info: ValidationInfo) -> tuple[int, ...]:
    """Return a marker as tokens of the model.

    Raises:
        ValueError: it is neither text nor a list of tokens of the vocabulary, or the model lacks its tokens.
    """
    if not isinstance(value, str):
        if not isinstance(value, list):
            raise ValueError(f"expected a string or a list of token ids, got {shown(value)}")
        if not value:
            raise ValueError("expected at least one token id, got []")
        return tuple(check_marker_ids(value, info))
    token_ids = read_phrase(value, info)
    tokenizer = model_of(info).tokenizer
    if tokenizer.unk_token_id in token_ids and tokenizer.unk_token not in value:
        raise ValueError(f"the model has no tokens for {shown(value)}: give another text, or token ids")
    # SentencePiece prepends a space to a text. If that is a separate token, it is not part of the marker.
    rest = token_ids[1:]
    return rest if rest and tokenizer.decode(rest, clean_up_tokenization_spaces=False) == value else token_ids


MarkerInput: TypeAlias = (
    Annotated[str, Field(min_length=1)]
    | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MAX_TEXT_TOKENS)]
)
MarkerInputOrNull: TypeAlias = MarkerInput | None
Marker = Annotated[
    tuple[int, ...],
    PlainValidator(
        read_marker,
        json_schema_input_type=MarkerInput,
    ),
    Expects("a text or a list of token ids"),
]
MarkerIds = Annotated[
    list[int],
    PlainValidator(
        check_marker_ids,
        json_schema_input_type=Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_TEXT_TOKENS)],
    ),
    Expects("a list of token ids"),
]
