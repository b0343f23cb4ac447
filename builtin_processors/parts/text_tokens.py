"""Tokenizes texts in a request's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import Field, PlainValidator, ValidationInfo

from logitship.builtin_processors.params import Expects, ModelFacts, model_of, shown

MAX_TEXT_TOKENS = 1024
"""Maximum tokens of a phrase or a marker: steps process them while all other requests wait."""
_MAX_CHARACTERS = 16 * MAX_TEXT_TOKENS
_MAX_CHARACTERS_OF_A_TOKEN = 1024


def read_phrase(value: Any, info: ValidationInfo) -> tuple[int, ...]:
    """Return the tokens of a text.

    Raises:
        ValueError: it is not a string, it is empty or too long, or the model lacks its tokens.
    """
    if not isinstance(value, str):
        raise ValueError(f"expected a string, got {shown(value)}")
    token_ids = encoded(value, model_of(info))
    if not token_ids:
        raise ValueError(f"expected a string of at least one token, got {shown(value)}")
    return token_ids


def read_token(value: Any, info: ValidationInfo) -> int:
    """Return the token of a text that is one token.

    A token that the tokenizer prepends to every text, for its beginning or a space, is ignored. (logits-processor-zoo
    uses the last of any two tokens.)

    Raises:
        ValueError: it is not a string, or not exactly one token of the model.
    """
    if not isinstance(value, str):
        raise ValueError(f"expected a string of one token, got {shown(value)}")
    if len(value) > _MAX_CHARACTERS_OF_A_TOKEN:
        raise ValueError(f"expected a string of one token, but {shown(value)} has {len(value)} characters")
    model = model_of(info)
    token_ids = encoded(value, model)
    if len(token_ids) == 2 and _is_prefix_token(token_ids[0], model.tokenizer):
        token_ids = token_ids[1:]
    if len(token_ids) != 1:
        raise ValueError(f"expected a string of one token, but {shown(value)} is {len(token_ids)} tokens of this model")
    if token_ids[0] == model.tokenizer.unk_token_id and value != model.tokenizer.unk_token:
        raise ValueError(f"expected a string of one token, but {shown(value)} is unknown to this model")
    return token_ids[0]


def read_token_or_eos(value: Any, info: ValidationInfo) -> int:
    """Return the token of a text that is one token, or the EOS token if there is no text.

    Raises:
        ValueError: see `read_token`; or the model has no EOS token.
    """
    return eos_token_id(model_of(info)) if value is None else read_token(value, info)


def eos_token_id(model: ModelFacts) -> int:
    """Return the model's EOS token; if it has several, the tokenizer's if that is one of them, else the lowest.

    Raises:
        ValueError: the model has no EOS token.
    """
    if not model.eos_token_ids:
        raise ValueError("the model has no EOS token")
    of_tokenizer = getattr(model.tokenizer, "eos_token_id", None)
    if isinstance(of_tokenizer, int) and of_tokenizer in model.eos_token_ids:
        return of_tokenizer
    return min(model.eos_token_ids)


def sentence_ends(model: ModelFacts) -> frozenset[int]:
    """Return the full-stop and newline tokens that the tokenizer produces at the end of a sentence.

    Tokens that merely end with one, such as two new lines in one token, are not among them, as in logits-processor-zoo.
    """
    texts = ("It is a sentence.", "It is a new line\n")
    return frozenset(last for text in texts for last in encoded(text, model)[-1:])


def encoded(text: str, model: ModelFacts) -> tuple[int, ...]:
    """Tokenize a text, which may be empty.

    Raises:
        ValueError: the model has no tokenizer, the text is too long, or the model cannot sample one of its tokens.
    """
    if model.tokenizer is None:
        raise ValueError("the model has no tokenizer to read a text with")
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"expected at most {_MAX_CHARACTERS} characters, got {len(text)}")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{shown(text)} contains an unpaired surrogate")
    token_ids = tuple(model.tokenizer.encode(text, add_special_tokens=False))
    if token_ids and max(token_ids) >= model.vocab_size:
        raise ValueError(f"{shown(text)} needs token {max(token_ids)}, which the model cannot sample")
    check_length(token_ids)
    return token_ids


def check_length(token_ids: Sequence[int]) -> None:
    """Refuse a marker or a phrase that is too long.

    Raises:
        ValueError: it has more than `MAX_TEXT_TOKENS` tokens.
    """
    if len(token_ids) > MAX_TEXT_TOKENS:
        raise ValueError(f"expected at most {MAX_TEXT_TOKENS} tokens, got {len(token_ids)}")


def _is_prefix_token(token_id: int, tokenizer: Any) -> bool:
    if tokenizer.bos_token and token_id == tokenizer.bos_token_id:
        return True
    # None or missing means unknown; like logits-processor-zoo, treat that as True.
    may_prefix_space = getattr(tokenizer, "add_prefix_space", None) is not False
    return may_prefix_space and not tokenizer.decode([token_id]).strip()


Text: TypeAlias = Annotated[str, Field(min_length=1)]
TextOrNull: TypeAlias = Text | None

PhraseTokens = Annotated[
    tuple[int, ...],
    PlainValidator(read_phrase, json_schema_input_type=Text),
    Expects("a string"),
]
TokenOfText = Annotated[
    int,
    PlainValidator(read_token, json_schema_input_type=Text),
    Expects("a string of one token"),
]
TokenOfTextOrEos = Annotated[
    int,
    PlainValidator(read_token_or_eos, json_schema_input_type=TextOrNull),
    Expects("a string of one token, or null for the EOS token"),
]

MAX_BOOST = 1e9
"""Far above the range of any model's logits, and low enough that all of a request's processors together leave finite
logits: `enforce` can double their range, and a request can have 64 processors."""
Boost = Annotated[float, Field(ge=-MAX_BOOST, le=MAX_BOOST), Expects("a number from -1e9 to 1e9")]
