"""The processors in a request to SGLang: `custom_logit_processor`, with `custom_params` of its sampling parameters.

`custom_logit_processor` is a processor string: of a class, or `{"name": …}` of a built-in one. It may also be the JSON
text of a list of `{"processor": …, "params": …}`, the processors of a request in the order in which they run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from logitship.builtin_processors.disallowed_tokens import DisallowedTokensLogitsProcessor
from logitship.builtin_processors.sglang_names import installed_by_reference
from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.processor_string import InstalledProcessor, PickledProcessor, parse
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.plugins.plugin_processors import PROCESSORS, check_form
from logitship.server.processors.request_processors import RESERVED_KEY, read_entries, read_processor
from logitship.server.refusals import RequestRefused
from logitship.server.requests.messages import AttachedProcessor, ProcessorRequest

FIELD = "custom_logit_processor"
PARAMS = "custom_params"
MAX_PROCESSORS = 64
"""Most processors of a request."""


def processors_of(generate: Any) -> list[tuple[str, Any]]:
    """Return the processor strings of a request, each with its `custom_params`. Equal pairs are returned once.

    Args:
        generate: SGLang's `GenerateReqInput`, normalized or not: it may hold several prompts.
    """
    found: list[tuple[str, Any]] = []
    for pair in _pairs(getattr(generate, FIELD, None), generate.sampling_params):
        if pair not in found:
            found.append(pair)
    return found


def _pairs(strings: Any, sampling_params: Any) -> Iterator[tuple[str, Any]]:
    several = isinstance(strings, list)
    for index, string in enumerate(strings if several else [strings]):
        if not string:
            continue
        if not isinstance(sampling_params, list):
            yield string, _custom_params(sampling_params)
        elif several:
            yield string, _custom_params(sampling_params[index] if index < len(sampling_params) else None)
        else:
            yield from ((string, _custom_params(each)) for each in sampling_params)


def _custom_params(sampling_params: Any) -> Any:
    return sampling_params.get(PARAMS) if isinstance(sampling_params, Mapping) else None


def read_fields(string: Any, params: Any, max_processor_size: int) -> tuple[ProcessorRequest, ...]:
    """Parse the processors of a request, in the order in which they run. Loads nothing.

    Args:
        string: `custom_logit_processor`.
        params: `custom_params`.
        max_processor_size: longest processor string, in bytes.

    Raises:
        ValueError: one of the two is malformed; names it.
    """
    if params is not None and not isinstance(params, Mapping):
        raise ValueError(f"{PARAMS}: must be an object")
    if params is not None and RESERVED_KEY in params:
        raise ValueError(f"{PARAMS}: the key {RESERVED_KEY!r} is the server's own")
    attached: Sequence[AttachedProcessor]
    try:
        if isinstance(string, str) and string.lstrip().startswith("["):
            attached = read_entries(
                _list(string, max_processor_size), PROCESSORS, max_processor_size=max_processor_size, params=params
            )
        else:
            attached = [read_processor(string, params, FIELD, max_processor_size=max_processor_size)]
    except RequestRefused as refused:
        raise ValueError(refused.message) from None
    return tuple(check_form(each, "SGLang") for each in attached)


def only_forbids(string: str) -> bool:
    """Return whether a processor string is that of SGLang's or logitship's built-in that only forbids tokens."""
    try:
        parsed = parse(string)
    except ProcessorLoadError:
        return False
    if isinstance(parsed, PickledProcessor):
        return installed_by_reference(parsed.payload) is DisallowedTokensLogitsProcessor
    return parsed == InstalledProcessor(DisallowedTokensLogitsProcessor.name)


def _list(text: str, max_processor_size: int) -> list[Any]:
    if len(text) > max_processor_size:
        raise ValueError(f"{FIELD}: has {len(text)} characters, this server takes at most {max_processor_size}")
    try:
        entries = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{FIELD}: is not JSON: {error}") from None
    assert isinstance(entries, list)
    if not 0 < len(entries) <= MAX_PROCESSORS:
        raise ValueError(f"{FIELD}: the list must have 1 to {MAX_PROCESSORS} processors, not {len(entries)}")
    return entries


_ALL_TOKENS = 1 << 30
"""SGLang's `top_k` for all tokens."""


def sampling_params_of(params: Any, uses: Sequence[ProcessorUse], eos_token_ids: frozenset[int]) -> SamplingParams:
    """Return the sampling parameters of a request as its processors see them.

    Args:
        params: SGLang's `SamplingParams`, normalized.
        uses: the request's processors.
        eos_token_ids: the model's end tokens.

    Raises:
        ValueError: SGLang accepts a value that logitship does not; names it.
    """
    stop, patterns = params.stop_strs or (), params.stop_regex_strs or ()
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=-1 if params.top_k >= _ALL_TOKENS else params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        seed=params.sampling_seed,
        max_tokens=params.max_new_tokens,
        min_tokens=params.min_new_tokens,
        stop=[stop] if isinstance(stop, str) else list(stop),
        stop_regex=[patterns] if isinstance(patterns, str) else list(patterns),
        stop_token_ids=params.stop_token_ids or (),
        eos_token_ids=eos_token_ids,
        ignore_eos=params.ignore_eos,
        include_stop_str_in_output=params.no_stop_trim,
        logit_bias={int(token): bias for token, bias in (params.logit_bias or {}).items()},
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        processors=tuple(uses),
    )
