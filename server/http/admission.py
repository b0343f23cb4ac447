"""From checked request bodies to the engine's `GenerationRequest`: what the two APIs share."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from logitship.client import processor_string
from logitship.client.errors import ProcessorLoadError
from logitship.client.processor_string import ProcessorString
from logitship.sampler.sampling_params import InvalidSamplingParams, SamplingParams
from logitship.server.config import ServerConfig
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.engine.messages import ProcessorRequest
from logitship.server.errors import SHIPPING_IS_OFF, BadRequest, RequestRefused, RequestTooLarge
from logitship.server.tokenizer import Tokenizer

from .schema import SamplingFields

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


async def read_prompt(engine: AsyncEngine, value: str | list[int], at: str, *, add_special_tokens: bool) -> Prompt:
    """A prompt as token ids.

    Raises:
        BadRequest: it has no token, or is far too long.
    """
    if isinstance(value, str):
        check_text_length(engine, len(value), at)
        token_ids = await asyncio.to_thread(engine.tokenizer.encode, value, add_special_tokens=add_special_tokens)
        prompt = Prompt(token_ids, value)
    else:
        prompt = Prompt(value)
    if not prompt.token_ids:
        raise BadRequest(f"{at}: is empty: there is nothing to continue", param=at)
    return prompt


def check_text_length(engine: AsyncEngine, characters: int, at: str) -> None:
    """Refuse a text that would not fit if it were all of the longest tokens. To tokenize it could take minutes.

    Raises:
        BadRequest: names the field.
    """
    limit = engine.model.max_model_len * engine.tokenizer.longest_token
    if characters > limit:
        raise BadRequest(
            f"{at}: has {characters} characters, but the model's length is {engine.model.max_model_len} tokens, prompt "
            f"and output together, and no token stands for more than {engine.tokenizer.longest_token} characters",
            param=at,
        )


def check_batch(config: ServerConfig, prompts: int, at: str, n: int = 1, n_at: str = "n") -> None:
    """Refuse an empty batch, and one that the server could not even queue.

    Args:
        config: has the limits.
        prompts: number of prompts.
        at: name of their field.
        n: number of continuations of each.
        n_at: path of that in the request body.

    Raises:
        BadRequest: names one of the two.
    """
    if prompts == 0:
        raise BadRequest(f"{at}: is an empty list: there is nothing to continue", param=at)
    limit = config.max_num_seqs + config.max_queued_requests
    if prompts * n > limit:
        name = n_at if n > 1 else at
        raise BadRequest(f"{name}: asks for {prompts * n} continuations, this server takes at most {limit}", param=name)


def check_one_a_prompt(value: object, prompts: int | None, at: str) -> None:
    """Refuse a list that has not one entry a prompt. Anything but a list goes with all prompts.

    Args:
        value: what the field holds.
        prompts: the number of prompts; None if the request holds a single one and not a list.
        at: name of the field.

    Raises:
        BadRequest: names the field.
    """
    if not isinstance(value, list):
        return
    if prompts is None:
        raise BadRequest(f"{at}: a list goes with a list of prompts", param=at)
    if len(value) != prompts:
        raise BadRequest(f"{at}: has {len(value)} entries for {prompts} prompts", param=at)


def entry(value: Any, index: int) -> Any:
    """What a field, checked by `check_one_a_prompt`, says of one prompt."""
    return value[index] if isinstance(value, list) else value


def entry_path(value: object, index: int, at: str) -> str:
    """Path of that in the request body."""
    return f"{at}[{index}]" if isinstance(value, list) else at


def default_that_fits(engine: AsyncEngine, prompt: Prompt, fields: SamplingFields, name: str) -> int | None:
    """The most output tokens: as the client says; its API's default is cut to what the model has room for."""
    value: int | None = getattr(fields, name)
    if value is None or name in fields.model_fields_set:
        return value
    return max(1, min(value, engine.model.max_model_len - len(prompt.token_ids)))


async def sampling_params(
    engine: AsyncEngine, fields: SamplingFields, names: Mapping[str, str], **values: Any
) -> SamplingParams:
    """The engine's sampling parameters.

    Args:
        engine: its tokenizer reads the bad words, its configuration has the default of `logprobs_mode`.
        fields: the parameters that the APIs share.
        names: the client's names for the fields of `SamplingParams`, where they differ.
        **values: the fields of `SamplingParams` that the APIs spell differently.

    Raises:
        BadRequest: a value is out of its range; names the field in the client's words.
    """
    try:
        if "__req__" in (fields.custom_params or {}):
            raise InvalidSamplingParams("custom_params", "the key '__req__' is the server's own")
        return SamplingParams(
            temperature=fields.temperature,
            top_p=fields.top_p,
            top_k=fields.top_k,
            min_p=fields.min_p,
            repetition_penalty=fields.repetition_penalty,
            frequency_penalty=fields.frequency_penalty,
            presence_penalty=fields.presence_penalty,
            stop=fields.stop,
            stop_token_ids=frozenset(fields.stop_token_ids),
            ignore_eos=fields.ignore_eos,
            logit_bias=fields.logit_bias,
            allowed_token_ids=None if fields.allowed_token_ids is None else frozenset(fields.allowed_token_ids),
            bad_words_token_ids=await asyncio.to_thread(_bad_words, engine.tokenizer, fields.bad_words),
            logprobs_mode=fields.logprobs_mode or engine.config.logprobs_mode,
            skip_special_tokens=fields.skip_special_tokens,
            spaces_between_special_tokens=fields.spaces_between_special_tokens,
            custom_params=fields.custom_params,
            **values,
        )
    except InvalidSamplingParams as error:
        raise in_client_words(BadRequest(error.reason, param=error.field), names) from None


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


def _bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences to forbid: each word as it begins a text, and as it follows a space."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip():
            raise InvalidSamplingParams("bad_words", "must not contain an empty string")
        for text in (word.lstrip(), f" {word.lstrip()}"):
            sequences[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(sequences)


def read_processors(
    engine: AsyncEngine, value: Any, params: Mapping[str, Any] | None, at: str = "custom_logit_processor"
) -> tuple[ProcessorRequest, ...]:
    """The processors of one prompt, not loaded yet.

    Args:
        engine: knows the limits, and what is installed.
        value: a processor string, the same as a JSON object, a list of several that run in this order, or None.
        params: `custom_params`; every processor of the prompt sees all of them.
        at: path of `value` in the request body.

    Raises:
        BadRequest: not a processor string, or one that ships code to a server that does not take it.
        RequestTooLarge: a string is over the server's limit.
    """
    if not isinstance(value, list):
        return () if value is None else (_read_processor(engine, value, params, at),)
    return tuple(_read_processor(engine, one, params, f"{at}[{index}]") for index, one in enumerate(value))


def _read_processor(engine: AsyncEngine, value: Any, params: Mapping[str, Any] | None, at: str) -> ProcessorRequest:
    string = _parse(value, engine.config.max_processor_size, at)
    check_may_ship(engine, string, at)
    return ProcessorRequest(string, None if params is None else dict(params))


def check_may_ship(engine: AsyncEngine, string: ProcessorString, at: str | None = None) -> None:
    """Refuse code, if the server does not take it.

    Args:
        at: path of the processor in the request body; None: it is the body.

    Raises:
        BadRequest: with SGLang's sentence.
    """
    if engine.ships_code(string) and not engine.config.enable_custom_logit_processor:
        raise BadRequest(SHIPPING_IS_OFF, param=at)


def _parse(value: Any, limit: int, at: str) -> ProcessorString:
    if not isinstance(value, str | dict):
        raise BadRequest(f"{at}: must be a processor string or its JSON object", param=at)
    text = value.encode() if isinstance(value, str) else _dumps(value, at)
    if len(text) > limit:
        raise RequestTooLarge(
            f"{at}: the processor string has {len(text)} bytes, this server takes at most {limit}", param=at
        )
    try:
        return processor_string.parse(text)
    except ProcessorLoadError as error:
        raise BadRequest(f"{at}: {error}", param=at) from None


def _dumps(value: dict[str, Any], at: str) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:  # it reads deeper nesting than it writes
        raise BadRequest(f"{at}: {error}", param=at) from None
