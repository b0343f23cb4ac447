"""The processors in a request to SGLang: `custom_logit_processor`, with `custom_params` of its sampling parameters.

`custom_logit_processor` is a processor string: of a class, or `{"name": …}` of a built-in one. It may also be the JSON
text of a list of `{"processor": …, "params": …}`, the processors of a request in the order in which they run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import orjson

from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.default_processors import DefaultProcessor
from logitship.server.requests.messages import ProcessorRequest
from logitship.server.runtime.request_fields import (
    PARAMS,
    PROCESSOR,
    check_params,
    parse_json,
    read_one,
    read_several,
    same_sampling_params,
    with_defaults,
)

BEAM_SEARCH = f"{PROCESSOR}: SGLang does not call processors in a beam search; leave out beam_width or the processor"

SENT = "logitship.processor"
"""Key of an HTTP request's scope: the processor and the `custom_params` of its JSON body."""
ROUTES_WITHOUT_FIELD = ("/v1/responses", "/v1/messages")
"""Routes that generate, whose schemas in SGLang have no processor. The plugin adds it."""


def read_body(body: Any, scope: MutableMapping[str, Any]) -> None:
    """Write processors that a JSON body has as objects as JSON text, in place, and keep them for `add_sent`.

    Args:
        body: the body, before SGLang checks it.
        scope: of its HTTP request.
    """
    if not isinstance(body, dict) or not body.get(PROCESSOR):
        return
    sent = body[PROCESSOR]
    several = isinstance(sent, list) and not all(isinstance(each, dict) and "processor" in each for each in sent)
    body[PROCESSOR] = [_as_text(each) for each in sent] if several else _as_text(sent)
    scope[SENT] = body[PROCESSOR], body.get(PARAMS)


def _as_text(processor: Any) -> Any:
    return orjson.dumps(processor).decode() if isinstance(processor, dict | list) else processor


def add_sent(generate: Any, scope: Mapping[str, Any]) -> None:
    """Add the processor of an HTTP request to it, if SGLang's schema of the route has dropped it.

    Args:
        generate: SGLang's `GenerateReqInput` or `EmbeddingReqInput`, not normalized.
        scope: of its HTTP request.

    Raises:
        ValueError: the route runs no processors.
    """
    if SENT not in scope or getattr(generate, PROCESSOR, None):
        return
    if not scope["path"].endswith(ROUTES_WITHOUT_FIELD):
        raise ValueError(f"{PROCESSOR}: SGLang calls no processors on the route {scope['path']}; leave it out")
    string, params = scope[SENT]
    setattr(generate, PROCESSOR, string)
    generate.sampling_params = {**(generate.sampling_params or {}), PARAMS: params}


def add_defaults(generate: Any, defaults: Sequence[DefaultProcessor]) -> None:
    """Add the operator's processors after those of a request: to each of its prompts.

    Args:
        generate: SGLang's `GenerateReqInput`, normalized or not, which `processors_of` has checked.
        defaults: the operator's.

    Raises:
        ValueError: a list of processors is not JSON.
    """
    strings = getattr(generate, PROCESSOR)
    several = isinstance(strings, list)
    added = [with_defaults(string or None, defaults) for string in (strings if several else [strings])]
    setattr(generate, PROCESSOR, added if several else added[0])


def processors_of(generate: Any) -> list[tuple[str, Any]]:
    """Return the processor strings of a request, each with its `custom_params`. Equal pairs are returned once.

    Args:
        generate: SGLang's `GenerateReqInput`, normalized or not: it may hold several prompts.

    Raises:
        ValueError: one is not a string, there is a list of them for one prompt, or the prompt is not one of tokens.
    """
    strings = getattr(generate, PROCESSOR, None)
    if strings is None or strings == "":
        return []
    prompts = generate.input_ids if generate.text is None else generate.text
    if prompts is None:
        raise ValueError("input_embeds: a request with a processor needs its prompt as text or input_ids")
    # By the rule of SGLang's `_determine_batch_size`. It would leave the list as it is, which stops its scheduler.
    if isinstance(strings, list) and (isinstance(prompts, str) or not len(prompts) or isinstance(prompts[0], int)):
        raise ValueError(f"{PROCESSOR}: must be a string, because there is one prompt; a list needs a list of prompts")
    pairs = _pairs(strings, generate.sampling_params)
    return list({(string, _text(params)): (string, params) for string, params in pairs}.values())


def _pairs(strings: Any, sampling_params: Any) -> Iterator[tuple[str, Any]]:
    several = isinstance(strings, list)
    for index, string in enumerate(strings if several else [strings]):
        if string is None or string == "":
            continue
        if not isinstance(string, str):
            raise ValueError(f"{PROCESSOR}: must be a string, or a list of strings and null")
        if not isinstance(sampling_params, list):
            yield string, _custom_params(sampling_params)
        elif several:
            yield string, _custom_params(sampling_params[index] if index < len(sampling_params) else None)
        else:
            yield from ((string, _custom_params(each)) for each in sampling_params)


def _text(params: Any) -> bytes | int:
    """Return a key that is the same for equal parameters, if they are JSON, as those of HTTP requests are."""
    try:
        return orjson.dumps(params, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return id(params)


def _custom_params(sampling_params: Any) -> Any:
    return sampling_params.get(PARAMS) if isinstance(sampling_params, Mapping) else None


def uses_beam_search(generate: Any) -> bool:
    """Return whether a request searches with beams, of which SGLang passes none through its processors.

    Args:
        generate: SGLang's `GenerateReqInput`, normalized or not.
    """
    params = generate.sampling_params if isinstance(generate.sampling_params, list) else [generate.sampling_params]
    widths = [each.get("beam_width") for each in params if isinstance(each, Mapping)]
    return any(isinstance(width, int) and width > 1 for width in widths)


def read_processors(string: Any, max_processor_size: int) -> tuple[ProcessorRequest, ...]:
    """Parse `custom_logit_processor`, in the order in which its processors run. Loads nothing.

    Args:
        string: `custom_logit_processor`.
        max_processor_size: longest processor string, in bytes.

    Raises:
        ValueError: it is malformed.
    """
    if not isinstance(string, str) or not string.lstrip().startswith("["):
        return read_one(string, "SGLang", max_processor_size=max_processor_size)
    if len(string) > max_processor_size:
        raise ValueError(f"{PROCESSOR}: has {len(string)} characters, this server takes at most {max_processor_size}")
    return read_several(parse_json(string, PROCESSOR), "SGLang", max_processor_size=max_processor_size, field=PROCESSOR)


def with_params(processors: Sequence[ProcessorRequest], params: Any) -> tuple[ProcessorRequest, ...]:
    """Return the processors of a request, with its `custom_params` for those without parameters of their own.

    Raises:
        ValueError: they are malformed.
    """
    params = check_params(params)
    return tuple(each if each.own else replace(each, params=params) for each in processors)


ADMITTED = "logitship:"
"""Start of a processor string that the front end has admitted. Its tenant follows, and another colon.

It makes the string one that no process of SGLang can unpickle, whether the plugin is there or not: it is not JSON.
"""


_WITH_EDITS = "logitship+edits:"
"""The same of a request with `return_sampling_edits`."""


def mark_admitted(
    generate: Any, tenant: str, texts: Mapping[str, str] = MappingProxyType({}), *, records_edits: bool = False
) -> None:
    """Mark the processor strings of a request, once it is admitted, for SGLang's scheduler.

    Args:
        generate: SGLang's `GenerateReqInput`, normalized or not.
        tenant: who sent it.
        texts: strings to send in place of those that name registered processors.
        records_edits: it asks for the edits of its logits.
    """
    strings = getattr(generate, PROCESSOR)
    several = isinstance(strings, list)
    marked = [
        f"{_WITH_EDITS if records_edits else ADMITTED}{tenant}:{texts.get(string, string)}" if string else string
        for string in (strings if several else [strings])
    ]
    setattr(generate, PROCESSOR, marked if several else marked[0])


def read_mark(marked: str) -> tuple[str, str]:
    """Return the tenant of an admitted processor string, and the string without its mark.

    Raises:
        ValueError: it has none.
    """
    if not is_admitted(marked):
        raise ValueError(f"{PROCESSOR}: the request has not been checked by logitship in SGLang's front end")
    _, tenant, string = marked.split(":", 2)
    return tenant, string


def is_admitted(marked: str) -> bool:
    """Return whether a processor string has a mark."""
    return marked.startswith((ADMITTED, _WITH_EDITS))


def records_edits(marked: str) -> bool:
    """Return whether an admitted request asks for the edits of its logits."""
    return marked.startswith(_WITH_EDITS)


_ALL_TOKENS = 1 << 30
"""SGLang's `top_k` for all tokens."""


def sampling_params_of(params: Any, uses: Sequence[ProcessorUse], eos_token_ids: frozenset[int]) -> SamplingParams:
    """Return the sampling parameters of a request as its processors see them, whatever values SGLang accepts.

    Args:
        params: SGLang's `SamplingParams`, normalized.
        uses: the request's processors.
        eos_token_ids: the model's EOS tokens.
    """
    stop, patterns = params.stop_strs or (), params.stop_regex_strs or ()
    return SamplingParams().with_checked(
        **same_sampling_params(params),
        top_k=-1 if params.top_k >= _ALL_TOKENS else params.top_k,
        seed=params.sampling_seed,
        max_tokens=params.max_new_tokens,
        min_tokens=params.min_new_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_regex=(patterns,) if isinstance(patterns, str) else tuple(patterns),
        stop_token_ids=frozenset(params.stop_token_ids or ()),
        eos_token_ids=eos_token_ids,
        include_stop_str_in_output=params.no_stop_trim,
        logit_bias={int(token): bias for token, bias in (params.logit_bias or {}).items()},
        processors=tuple(uses),
    )
