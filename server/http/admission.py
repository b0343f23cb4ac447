"""Shared steps of both APIs from a validated body to the engine's `GenerationRequest`."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from logitship.client.errors import ProcessorLoadError
from logitship.sampler.sampling_params import InvalidSamplingParams, SamplingParams
from logitship.server.api_keys import Caller
from logitship.server.config import ServerConfig
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.processors.request_processors import RESERVED_KEY, read_entries, read_processor
from logitship.server.refusals import BadRequest, NotFound
from logitship.server.requests.messages import AttachedProcessor, ProcessorRequest
from logitship.server.requests.request_validation import (
    Prompt,
    bad_words_token_ids,
    check_text_length,
    encode_prompt,
    in_client_words,
)
from logitship.server.schemas.request_schema import SamplingFields
from logitship.server.schemas.structured_outputs import Constraint
from logitship.server.uploads.request_bodies import RequestWork
from logitship.server.uploads.upload_engine import check_may_ship

ANY_MODEL = "default"
"""SGLang's alias for the served model, whatever its name."""

_WORDS_AT_A_TIME = 64
"""Bad words of a job on the work pool."""


def check_model_name(engine: AsyncEngine, name: str | None) -> None:
    """Check the name of the requested model. None: the served one.

    Raises:
        NotFound: the server does not serve this model.
    """
    if name not in (None, engine.model.name, engine.model.path, ANY_MODEL):
        raise NotFound(f"model: {name[:200]!r} does not exist; this server serves {engine.model.name!r}", param="model")


async def read_prompt(
    engine: AsyncEngine, work: RequestWork, value: str | list[int], at: str, *, add_special_tokens: bool
) -> Prompt:
    """Tokenize a prompt, unless it is a list of token ids already.

    Raises:
        BadRequest: the prompt is empty, or far too long.
        QueueFull: too many requests of the tenant wait for that.
    """
    if isinstance(value, str) and not work.is_short(value):
        check_text_length(engine.tokenizer, engine.model.max_model_len, len(value), at)  # before it waits
        return await work.run(
            encode_prompt,
            engine.tokenizer,
            engine.model.max_model_len,
            value,
            at,
            add_special_tokens=add_special_tokens,
        )
    await asyncio.sleep(0)  # a batch may have a thousand: let others run in between
    return encode_prompt(engine.tokenizer, engine.model.max_model_len, value, at, add_special_tokens=add_special_tokens)


def check_batch(config: ServerConfig, prompts: int, at: str, n: int = 1, n_at: str = "n") -> None:
    """Refuse an empty batch, and one that exceeds the queue.

    Args:
        config: the limits.
        prompts: number of prompts.
        at: name of the field with the prompts.
        n: number of continuations per prompt.
        n_at: path of the field with `n`.

    Raises:
        BadRequest: names one of the two fields.
    """
    if prompts == 0:
        raise BadRequest(f"{at}: must not be an empty list", param=at)
    check_continuations(config, prompts * n, n_at if n > 1 else at)


def check_continuations(config: ServerConfig, count: int, at: str) -> None:
    """Refuse a body with more continuations than the queue takes.

    Raises:
        BadRequest: names the field `at`.
    """
    limit = config.max_sequences_per_tenant
    if count > limit:
        raise BadRequest(f"{at}: asks for {count} continuations, this server takes at most {limit}", param=at)


def check_one_per_prompt(value: object, prompts: int | None, at: str) -> None:
    """Refuse a list whose length is not the number of prompts. Any other value applies to all prompts.

    Args:
        value: value of the field.
        prompts: number of prompts; None if the request has a single prompt outside of a list.
        at: name of the field.

    Raises:
        BadRequest: names the field.
    """
    if not isinstance(value, list):
        return
    if prompts is None:
        raise BadRequest(f"{at}: must not be a list, because there is no list of prompts", param=at)
    if len(value) != prompts:
        raise BadRequest(f"{at}: has {len(value)} entries for {prompts} prompts", param=at)


def value_for_prompt(value: Any, index: int) -> Any:
    """Return the value of one prompt, from a field that `check_one_per_prompt` has checked."""
    return value[index] if isinstance(value, list) else value


def path_for_prompt(value: object, index: int, at: str) -> str:
    """Return the path of that value in the request body."""
    return f"{at}[{index}]" if isinstance(value, list) else at


def max_tokens_within_model(engine: AsyncEngine, prompt: Prompt, fields: SamplingFields, name: str) -> int | None:
    """Return the client's limit on output tokens, or the API's default, reduced to the model's length."""
    value: int | None = getattr(fields, name)
    if value is None or name in fields.model_fields_set:
        return value
    return max(1, min(value, engine.model.max_model_len - len(prompt.token_ids)))


async def _tokenize_bad_words(
    engine: AsyncEngine, work: RequestWork, words: Sequence[str]
) -> tuple[tuple[int, ...], ...]:
    """Tokenize bad words, a few at a time: all of them may take a second."""
    sequences: dict[tuple[int, ...], None] = {}
    for start in range(0, len(words), _WORDS_AT_A_TIME):
        part = words[start : start + _WORDS_AT_A_TIME]
        sequences |= dict.fromkeys(await work.run(bad_words_token_ids, engine.tokenizer, part))
    return tuple(sequences)


_SHARED_FIELDS = tuple(
    each.name for each in dataclasses.fields(SamplingParams) if each.name in SamplingFields.model_fields
)
"""Sampling parameters that a request states under the engine's name in both APIs."""


async def sampling_params(
    engine: AsyncEngine, work: RequestWork, fields: SamplingFields, names: Mapping[str, str], **values: Any
) -> SamplingParams:
    """Build the engine's sampling parameters.

    Args:
        engine: has the tokenizer, and configures the default of `logprobs_mode`.
        work: tokenizes the bad words.
        fields: the parameters with the same name in both APIs.
        names: the client's names of the fields of `SamplingParams`, where they differ.
        **values: fields of `SamplingParams` that the APIs name differently.

    Raises:
        BadRequest: a value is out of range; names the field as the client does.
    """
    try:
        if RESERVED_KEY in (fields.custom_params or {}):
            raise InvalidSamplingParams("custom_params", f"the key {RESERVED_KEY!r} is reserved for the server")
        # Beam search has defaults of its own: no sampling, and log-probabilities after all edits.
        searches = fields.beam_search is not None
        shared = {name: getattr(fields, name) for name in _SHARED_FIELDS}
        if searches and "temperature" not in fields.model_fields_set:
            shared["temperature"] = 0
        if fields.logprobs_mode is None:
            shared["logprobs_mode"] = "processed_logprobs" if searches else engine.config.logprobs_mode
        if fields.bad_words:
            values["bad_words_token_ids"] = await _tokenize_bad_words(engine, work, fields.bad_words)
        return await work.run_if_large(SamplingParams, **{**shared, **values})
    except InvalidSamplingParams as error:
        raise in_client_words(BadRequest(error.reason, param=error.field), names) from None


@dataclass(frozen=True)
class ParsedProcessors:
    """The processors of one prompt.

    Attributes:
        processors: in the order in which they run, not loaded yet.
        names: paths of the processors and their parameters in the request body, for the engine's refusals.
    """

    processors: tuple[AttachedProcessor, ...]
    names: Mapping[str, str]


class ProcessorFields(Protocol):
    """The two fields of a body that contain processors, see the schemas."""

    custom_logit_processor: Any
    logits_processors: Any


def check_processor_lists(body: ProcessorFields, prompts: int) -> None:
    """Refuse lists of processors whose length is not the number of prompts.

    Raises:
        BadRequest: names the field.
    """
    check_one_per_prompt(body.custom_logit_processor, prompts, "custom_logit_processor")
    if _is_list_of_lists(body.logits_processors):
        check_one_per_prompt(body.logits_processors, prompts, "logits_processors")


def read_processors(
    engine: AsyncEngine,
    caller: Caller,
    body: ProcessorFields,
    index: int | None,
    params: Mapping[str, Any] | None,
    params_at: str,
    constraint: Constraint | None = None,
) -> ParsedProcessors:
    """Parse the processors of one prompt.

    Args:
        engine: has the limits and the installed processors.
        caller: who sent the body.
        body: the request body.
        index: index of the prompt; None if the body has a single prompt outside of a list.
        params: `custom_params`: parameters of the processors without parameters of their own.
        params_at: path of `params` in the request body.
        constraint: the request's structured output, which becomes the first processor.

    Raises:
        BadRequest: not a processor, or it ships or names code that the server does not accept.
        Forbidden: it ships code, but this API key may not.
        RequestTooLarge: a processor string exceeds the server's limit.
    """
    single, single_at = body.custom_logit_processor, "custom_logit_processor"
    entries, entries_at = body.logits_processors, "logits_processors"
    if single is not None and entries is not None:
        raise BadRequest(f"{entries_at}: give either this or {single_at}, not both", param=entries_at)
    if index is not None:
        single, single_at = value_for_prompt(single, index), path_for_prompt(single, index, single_at)
        if entries is not None and _is_list_of_lists(entries):
            entries, entries_at = entries[index], f"{entries_at}[{index}]"
    limit = engine.config.max_processor_size
    if entries is not None:
        at = entries_at
        processors = read_entries(entries, at, max_processor_size=limit, params=params)
        paths = [f"{at}[{i}]" for i in range(len(processors))]
        has_params = [isinstance(entry, Mapping) and entry.get("params") is not None for entry in entries]
        params_paths = [f"{path}.params" if own else params_at for path, own in zip(paths, has_params, strict=True)]
    else:
        at = single_at
        values = single if isinstance(single, list) else [] if single is None else [single]
        paths = [f"{at}[{i}]" for i in range(len(values))] if isinstance(single, list) else [at] * len(values)
        processors = tuple(
            read_processor(value, params, path, max_processor_size=limit)
            for value, path in zip(values, paths, strict=True)
        )
        params_paths = [params_at] * len(values)
    for processor, path in zip(processors, paths, strict=True):
        check_may_run(engine, caller, processor, path)
    if constraint is not None:
        processors = (constraint.processor, *processors)
        paths, params_paths = [constraint.at, *paths], [constraint.at, *params_paths]
    names = {"processors": at}
    for i, (path, params_path) in enumerate(zip(paths, params_paths, strict=True)):
        names |= {f"processors[{i}]": path, f"processors[{i}].params": params_path}
    return ParsedProcessors(processors, names)


def _is_list_of_lists(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, list) for each in value)


def check_may_run(engine: AsyncEngine, caller: Caller, processor: AttachedProcessor, at: str) -> None:
    """Refuse shipped code and callables by name that the server, or this API key, does not permit.

    Raises:
        BadRequest: with SGLang's or vLLM's message.
        Forbidden: other API keys may ship code, this one may not.
    """
    if isinstance(processor, ProcessorRequest):
        check_may_ship(engine, caller, processor.string, at)
        return
    try:
        engine.processors.check_callable(processor)
    except ProcessorLoadError as error:
        raise BadRequest(f"{at}: {error}", param=at) from None
