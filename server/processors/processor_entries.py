"""Parses the processors of a request from JSON. Loads nothing.

An entry of the list `logits_processors` is one of:

```
{"processor": <processor string, or its JSON object>, "params": {…}}     a processor, with its own parameters
{"qualname": "module.Class", "args": […], "kwargs": {…}}                 a request-level callable on the server
"module.function"                                                        the same, without constructor arguments
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization import processor_string
from logitship.client.serialization.processor_string import ProcessorString
from logitship.server.refusals import BadRequest, RequestTooLarge
from logitship.server.requests.messages import AttachedProcessor, CallableRequest, ProcessorRequest

RESERVED_KEY = "__req__"
"""Key of the request among the parameters that a processor gets."""


def read_entries(
    entries: Sequence[Any], at: str, *, max_processor_size: int, params: Mapping[str, Any] | None = None
) -> tuple[AttachedProcessor, ...]:
    """Parse the list `logits_processors`, in the order in which they run.

    Args:
        entries: the list.
        at: path of the list in the request.
        max_processor_size: longest processor string, in bytes.
        params: parameters of entries without their own: the request's `custom_params`.

    Raises:
        BadRequest: an entry is malformed; names it.
        RequestTooLarge: a processor string is over the limit.
    """
    return tuple(
        read_entry(entry, f"{at}[{index}]", max_processor_size=max_processor_size, params=params)
        for index, entry in enumerate(entries)
    )


def read_entry(
    entry: Any, at: str, *, max_processor_size: int, params: Mapping[str, Any] | None = None
) -> AttachedProcessor:
    """Parse one entry, see `read_entries`."""
    if isinstance(entry, str):
        return CallableRequest(_qualname(entry, at))
    if not isinstance(entry, Mapping):
        raise BadRequest(f"{at}: must be an object with 'processor' or 'qualname', or a qualified name", param=at)
    if "qualname" in entry:
        return _read_callable(entry, at)
    _only(entry, at, "processor", "params")
    if entry.get("processor") is None:
        raise BadRequest(f"{at}: has neither 'processor' nor 'qualname'", param=at)
    own = entry.get("params")
    if own is not None and not isinstance(own, Mapping):
        raise BadRequest(f"{at}.params: must be an object", param=f"{at}.params")
    if RESERVED_KEY in (own or {}):
        raise BadRequest(f"{at}.params: the key {RESERVED_KEY!r} is the server's own", param=f"{at}.params")
    string = _parse(entry["processor"], max_processor_size, f"{at}.processor")
    if own is not None:
        return ProcessorRequest(string, own, own=True)
    return ProcessorRequest(string, params)


def read_processor(
    value: Any, params: Mapping[str, Any] | None, at: str, *, max_processor_size: int
) -> ProcessorRequest:
    """Parse a processor string, or its JSON object.

    Raises:
        BadRequest: it is neither, or has none of the four forms.
        RequestTooLarge: it is over the limit.
    """
    return ProcessorRequest(_parse(value, max_processor_size, at), params)


def _read_callable(entry: Mapping[str, Any], at: str) -> CallableRequest:
    _only(entry, at, "qualname", "args", "kwargs")
    args, kwargs = entry.get("args"), entry.get("kwargs")
    if args is not None and not isinstance(args, list):
        raise BadRequest(f"{at}.args: must be a list", param=f"{at}.args")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise BadRequest(f"{at}.kwargs: must be an object", param=f"{at}.kwargs")
    qualname = _qualname(entry["qualname"], f"{at}.qualname")
    return CallableRequest(qualname, tuple(args or ()), dict(kwargs or {}))


def _qualname(value: Any, at: str) -> str:
    if isinstance(value, str) and value and not value.lstrip().startswith("{"):
        return value
    raise BadRequest(
        f"{at}: must be the qualified name of a callable, such as 'module.Class' (a processor string goes into an "
        "object's 'processor')",
        param=at,
    )


def _only(entry: Mapping[str, Any], at: str, *known: str) -> None:
    unknown = sorted(set(entry) - set(known))
    if unknown:
        raise BadRequest(f"{at}: has an unknown key {unknown[0][:80]!r}; the keys are {', '.join(known)}", param=at)


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
    except orjson.JSONEncodeError as error:  # orjson parses deeper nesting than it writes
        raise BadRequest(f"{at}: {error}", param=at) from None
