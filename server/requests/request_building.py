"""Parts of a `GenerationRequest` that the HTTP routes and the offline classes build in the same way."""

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
"""A field name in a message. Names without an underscore may be ordinary words; quoted text is the client's."""


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        token_ids: the prompt, never empty.
        text: the text that was tokenized, or None if the prompt was given as token ids.
    """

    token_ids: list[int]
    text: str | None = None


def encode_prompt(
    tokenizer: Tokenizer, max_model_len: int, value: str | list[int], at: str, *, add_special_tokens: bool = True
) -> Prompt:
    """Tokenize a prompt. That takes time: do not call it on an event loop with a text.

    Args:
        tokenizer: the model's tokenizer.
        max_model_len: the model's length, in tokens.
        value: text or token ids.
        at: path of the prompt in the request, for errors.
        add_special_tokens: add the tokens that the model expects around a text.

    Raises:
        BadRequest: it has no tokens, or is far too long.
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
    """Refuse a text that would not fit even if all its tokens were the longest. Tokenizing it could take minutes.

    Raises:
        BadRequest: it is too long.
    """
    limit = max_model_len * tokenizer.longest_token
    if characters > limit:
        raise BadRequest(
            f"{at}: has {characters} characters, but the model's length is {max_model_len} tokens, prompt "
            f"and output together, and no token has more than {tokenizer.longest_token} characters",
            param=at,
        )


def bad_words_token_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences to forbid: each word at the start of a text, and after a space.

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
    """Rename the fields in a refusal to the client's names, and put the name of the field before the message.

    Args:
        refused: a refusal whose `param` is the engine's name of a field. Modified in place.
        names: engine's name → client's name, where they differ.
    """
    if refused.param is not None:
        refused.param = names.get(refused.param, refused.param)
        message = _NAME_WITH_UNDERSCORE.sub(lambda found: names.get(found[0], found[0]), refused.message)
        refused.message = f"{refused.param}: {message}"
    return refused
