"""From what a caller writes to the engine's `GenerationRequest`: what the HTTP routes and the offline classes share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from logitship.sampler.sampling_params import InvalidSamplingParams
from logitship.server.refusals import BadRequest, RequestRefused
from logitship.server.tokenizer import Tokenizer

Refused = TypeVar("Refused", bound=RequestRefused)

_NAME_WITH_UNDERSCORE = re.compile(r"(?<![\w'])[a-z]+(?:_[a-z]+)+(?![\w'])")
"""Any other field's name is also a word, which a message may use as one. In quotes stand the client's own words."""


@dataclass(frozen=True)
class Prompt:
    """What is continued.

    Attributes:
        token_ids: the prompt, never empty.
        text: the text that it was made of, or None if it came as token ids.
    """

    token_ids: list[int]
    text: str | None = None


def encode_prompt(
    tokenizer: Tokenizer, max_model_len: int, value: str | list[int], at: str, *, add_special_tokens: bool = True
) -> Prompt:
    """A prompt as token ids. Tokenizing takes time: do not call it on an event loop.

    Raises:
        BadRequest: it has no token, or is far too long; names `at`.
    """
    if isinstance(value, str):
        check_text_length(tokenizer, max_model_len, len(value), at)
        prompt = Prompt(tokenizer.encode(value, add_special_tokens=add_special_tokens), value)
    else:
        prompt = Prompt(value)
    if not prompt.token_ids:
        raise BadRequest(f"{at}: is empty: there is nothing to continue", param=at)
    return prompt


def check_text_length(tokenizer: Tokenizer, max_model_len: int, characters: int, at: str) -> None:
    """Refuse a text that would not fit if it were all of the longest tokens. To tokenize it could take minutes.

    Raises:
        BadRequest: names the field.
    """
    limit = max_model_len * tokenizer.longest_token
    if characters > limit:
        raise BadRequest(
            f"{at}: has {characters} characters, but the model's length is {max_model_len} tokens, prompt "
            f"and output together, and no token stands for more than {tokenizer.longest_token} characters",
            param=at,
        )


def bad_words_token_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences to forbid: each word as it begins a text, and as it follows a space.

    Raises:
        InvalidSamplingParams: a word is empty.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip():
            raise InvalidSamplingParams("bad_words", "must not contain an empty string")
        for text in (word.lstrip(), f" {word.lstrip()}"):
            sequences[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(sequences)


def in_client_words(refused: Refused, names: Mapping[str, str]) -> Refused:
    """Put the client's names of fields in a refusal, and the name of the offending one before its message.

    Args:
        refused: `param` is the engine's name of a field; is changed.
        names: the client's names for the engine's, where they differ.
    """
    if refused.param is not None:
        refused.param = names.get(refused.param, refused.param)
        message = _NAME_WITH_UNDERSCORE.sub(lambda found: names.get(found[0], found[0]), refused.message)
        refused.message = f"{refused.param}: {message}"
    return refused
