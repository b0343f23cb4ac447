"""The fields of requests to other engines that hold processors, and the sampling parameters that these see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from logitship.client.serialization.processor_string import to_text
from logitship.server.default_processors import DefaultProcessor
from logitship.server.processors.registration import sendable
from logitship.server.processors.request_processors import RESERVED_KEY, read_entries, read_processor
from logitship.server.refusals import RequestRefused
from logitship.server.requests.messages import AttachedProcessor, CallableRequest, ProcessorRequest

PROCESSOR = "custom_logit_processor"
"""One processor string."""
PARAMS = "custom_params"
"""Parameters of the processors that have none of their own."""
PROCESSORS = "logits_processors"
"""The list of several processors."""
MASK, FORMAT, EDITS = MASK_FIELDS = ("return_sampling_mask", "sampling_mask_format", "return_sampling_edits")
"""The fields for the record of a request's sampling."""
MAX_PROCESSORS = 64
"""Most processors of a request."""
_SAME_NAMES = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
"""Sampling parameters that vLLM, SGLang and logitship name alike."""


def read_one(
    value: Any, engine: str, *, max_processor_size: int, params: Mapping[str, Any] | None = None
) -> tuple[ProcessorRequest, ...]:
    """Parse `custom_logit_processor`. Loads nothing.

    Args:
        value: a processor string, or its object.
        engine: the engine's name.
        max_processor_size: longest processor string, in bytes.
        params: the request's `custom_params`.

    Raises:
        ValueError: it is malformed, or of a form that no plugin takes; names the field.
    """
    try:
        found = read_processor(value, params, PROCESSOR, max_processor_size=max_processor_size)
    except RequestRefused as refused:
        raise ValueError(refused.message) from None
    return (_of_taken_form(found, engine),)


def read_several(
    entries: Any,
    engine: str,
    *,
    max_processor_size: int,
    params: Mapping[str, Any] | None = None,
    field: str = PROCESSORS,
) -> tuple[ProcessorRequest, ...]:
    """Parse a list of `{"processor": …, "params": …}`, in the order in which they run. Loads nothing.

    Args:
        entries: the list.
        engine: the engine's name.
        max_processor_size: longest processor string, in bytes.
        params: the request's `custom_params`.
        field: the field that has the list.

    Raises:
        ValueError: it is malformed, or has none or too many, or one of a form that no plugin takes; names the field.
    """
    if not isinstance(entries, list):
        raise ValueError(f"{field}: must be a list, as JSON text")
    if not 0 < len(entries) <= MAX_PROCESSORS:
        raise ValueError(f"{field}: the list must have 1 to {MAX_PROCESSORS} processors, not {len(entries)}")
    try:
        found = read_entries(entries, PROCESSORS, max_processor_size=max_processor_size, params=params)
    except RequestRefused as refused:
        raise ValueError(refused.message) from None
    return tuple(_of_taken_form(each, engine) for each in found)


def check_params(params: Any, form: str = "an object") -> Mapping[str, Any] | None:
    """Return `custom_params`.

    Raises:
        ValueError: they are not an object, or have the server's own key.
    """
    if params is not None and not isinstance(params, Mapping):
        raise ValueError(f"{PARAMS}: must be {form}")
    if params is not None and RESERVED_KEY in params:
        raise ValueError(f"{PARAMS}: the key {RESERVED_KEY!r} is the server's own")
    return params


def parse_json(text: str, field: str) -> Any:
    """Parse the JSON text in a field.

    Raises:
        ValueError: it is not JSON; names the field.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{field}: is not JSON: {error}") from None


def same_sampling_params(params: Any) -> dict[str, Any]:
    """Return those of an engine's sampling parameters that vLLM, SGLang and logitship name alike."""
    return {name: getattr(params, name) for name in _SAME_NAMES}


def _of_taken_form(attached: AttachedProcessor, engine: str) -> ProcessorRequest:
    """Return a processor of a request if it is of a form that a plugin takes."""
    if isinstance(attached, CallableRequest):
        raise ValueError(f"{PROCESSORS}: callables by name are not taken inside {engine}; send a processor")
    return attached


def with_defaults(value: Any, defaults: Sequence[DefaultProcessor]) -> str:
    """Return the JSON text of a list of a request's own processors, and of those of every request after them.

    Args:
        value: a processor string or its object; or a list, as such or as JSON text; None: the request has none.
        defaults: the operator's.

    Raises:
        ValueError: it is a text that begins as a list, and is not JSON.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(value, PROCESSORS)
    entries = value if isinstance(value, list) else [] if value is None else [{"processor": value}]
    attached = [dict(default.entry) for default in defaults]
    # Offline, the same request may come again.
    own = entries[: -len(attached)] if entries[-len(attached) :] == attached else entries
    return orjson.dumps([*own, *attached]).decode()


def with_strings(value: Any, processors: Sequence[ProcessorRequest]) -> Any:
    """Return the value of a field with the strings of its processors: what it names may be registered.

    Args:
        value: a processor string or its object; or a list, as such or as JSON text.
        processors: what was parsed of it.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        return orjson.dumps(with_strings(orjson.loads(value), processors)).decode()
    if isinstance(value, list):
        return [
            {**entry, "processor": to_text(sendable(each.string))}
            for entry, each in zip(value, processors, strict=True)
        ]
    return to_text(sendable(processors[0].string))


def check_mask_fields(fields: Mapping[str, Any], engine: str, *, returns_lists: bool) -> bool:
    """Check the fields for sampling masks, and return whether a request asks for packed ones.

    Args:
        fields: the request's fields of `MASK_FIELDS`, and others.
        engine: name of the engine.
        returns_lists: it returns masks as lists, too.

    Raises:
        ValueError: a field is malformed, or needs another one; names it.
    """
    if fields.get(EDITS) not in (None, False, True):
        raise ValueError(f"{EDITS}: must be true or false")
    if fields.get(FORMAT) not in (None, "lists", "packed"):
        raise ValueError(f"{FORMAT}: must be lists or packed")
    if not fields.get(MASK):
        for name in (FORMAT, EDITS):
            if fields.get(name):
                raise ValueError(f"{name}: requires {MASK}")
        return False
    is_packed = fields.get(FORMAT) == "packed"
    if not is_packed and not returns_lists:
        raise ValueError(f"{FORMAT}: must be packed: inside {engine}, {MASK} returns no lists")
    if not is_packed and fields.get(EDITS):
        raise ValueError(f"{EDITS}: requires {FORMAT} packed")
    return is_packed
