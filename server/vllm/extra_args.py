"""The processors in a request to vLLM: `vllm_xargs` in JSON, `extra_args` of its `SamplingParams`.

`custom_logit_processor` is a processor string, `custom_params` the JSON text of its parameters; or `logits_processors`
is the JSON text of a list of `{"processor": …, "params": …}`. They are text, because `vllm_xargs` takes only text,
numbers and lists of them. Offline, `extra_args` takes anything, so the values themselves are accepted too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from logitship.client.http.vllm_handshake import PROBE
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.default_processors import DefaultProcessor
from logitship.server.requests.messages import ProcessorRequest
from logitship.server.runtime.request_fields import (
    EDITS,
    MASK,
    PARAMS,
    PROCESSOR,
    PROCESSORS,
    check_params,
    parse_json,
    read_one,
    read_several,
    same_sampling_params,
    with_defaults,
    with_strings,
)

_NOT_BOTH = f"{PROCESSORS}: give either this or {PROCESSOR}, not both"


def has_processors(params: Any) -> bool:
    """Return True if a request has processors, valid or not.

    Args:
        params: vLLM's `SamplingParams`.
    """
    extra_args = params.extra_args
    return bool(extra_args) and (extra_args.get(PROCESSOR) is not None or extra_args.get(PROCESSORS) is not None)


def asks_for_masks(params: Any) -> bool:
    """Return True if a request asks for its sampling masks."""
    return bool((getattr(params, "extra_args", None) or {}).get(MASK))


def asks_for_edits(params: Any) -> bool:
    """Return True if it asks for the edits of its logits as well."""
    return bool((params.extra_args or {}).get(EDITS))


def asks_for_plugin_info(params: Any) -> bool:
    """Return True if a client only asks whether the plugin is there. Such a request must not generate."""
    extra_args = params.extra_args
    return bool(extra_args) and PROBE.items() <= extra_args.items()


def read_processors(extra_args: Mapping[str, Any], max_processor_size: int) -> tuple[ProcessorRequest, ...]:
    """Parse the processors of a request, in the order in which they run. Loads nothing.

    Args:
        extra_args: the request's.
        max_processor_size: longest processor string, in bytes.

    Raises:
        ValueError: one of the three values is malformed; names it.
    """
    one, several = extra_args.get(PROCESSOR), extra_args.get(PROCESSORS)
    if one is not None and several is not None:
        raise ValueError(_NOT_BOTH)
    params = check_params(_decode(extra_args.get(PARAMS), PARAMS), "an object, as JSON text")
    if several is None:
        return read_one(one, "vLLM", max_processor_size=max_processor_size, params=params)
    entries = _decode(several, PROCESSORS)
    return read_several(entries, "vLLM", max_processor_size=max_processor_size, params=params)


def with_processors(extra_args: Mapping[str, Any], processors: Sequence[ProcessorRequest]) -> dict[str, Any]:
    """Return `extra_args` with the strings of the request's processors, in place of names and digests."""
    field = PROCESSOR if extra_args.get(PROCESSOR) is not None else PROCESSORS
    return {**extra_args, field: with_strings(extra_args[field], processors)}


def with_default_processors(
    extra_args: Mapping[str, Any] | None, defaults: Sequence[DefaultProcessor]
) -> dict[str, Any]:
    """Return `extra_args` with the operator's processors after those of the request.

    Raises:
        ValueError: those of the request are malformed.
    """
    own = dict(extra_args or {})
    one, several = own.pop(PROCESSOR, None), own.get(PROCESSORS)
    if one is not None and several is not None:
        raise ValueError(_NOT_BOTH)
    return {**own, PROCESSORS: with_defaults(several if one is None else one, defaults)}


def _decode(value: Any, at: str) -> Any:
    return parse_json(value, at) if isinstance(value, str) else value


def sampling_params(params: Any, uses: Sequence[ProcessorUse], eos_token_ids: frozenset[int]) -> SamplingParams:
    """Return the sampling parameters of a request as its processors see them.

    Args:
        params: vLLM's `SamplingParams`.
        uses: the request's processors.
        eos_token_ids: the model's EOS tokens.

    Raises:
        ValueError: vLLM accepts a value that logitship does not; names it.
    """
    return SamplingParams(
        **same_sampling_params(params),
        top_k=params.top_k,
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        eos_token_ids=eos_token_ids,
        include_stop_str_in_output=params.include_stop_str_in_output,
        logit_bias=params.logit_bias or {},
        allowed_token_ids=params.allowed_token_ids,
        bad_words_token_ids=params.bad_words_token_ids or (),
        processors=tuple(uses),
    )
