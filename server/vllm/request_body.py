"""The processors in the JSON body of an HTTP request to vLLM, wherever they stand: moved to `vllm_xargs`, or refused.

vLLM drops fields that a route does not know, and so the processors of requests that are written for SGLang or for
logitship's own server. The fields of sampling masks are moved in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from logitship.server.runtime.request_fields import (
    MASK,
    MASK_FIELDS,
    PARAMS,
    PROCESSOR,
    PROCESSORS,
    check_mask_fields,
)
from logitship.server.runtime.response_receipts import expect_receipts

_XARGS = "vllm_xargs"
_ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
"""Routes that pass `vllm_xargs` on. vLLM may be served below another path."""
_MASK_ROUTES = ("/v1/completions", "/v1/chat/completions")


async def read_json(json: Callable[..., Any], request: Any) -> Any:
    """Parse the body of a request. A hook around Starlette's method.

    Raises:
        HTTPException: the request cannot have processors or sampling masks, with status 400.
    """
    from fastapi import HTTPException

    body = await json(request)
    if isinstance(body, dict):
        try:
            path = request.scope["path"]
            is_processed, is_recorded = move_processors(body, path), move_mask_fields(body, path)
            if is_processed or is_recorded:
                expect_receipts()
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
    return body


def move_processors(body: dict[str, Any], path: str) -> bool:
    """Move the processors of a request to `vllm_xargs`, as JSON text, in place. Does nothing the second time.

    Args:
        body: the request.
        path: its route.

    Returns:
        True if it has processors.

    Raises:
        ValueError: it has processors twice, or the route or a beam search would drop them.
    """
    xargs = body.get(_XARGS) or {}
    if not isinstance(xargs, dict):
        return False  # vLLM refuses it
    fields = [name for name in (PROCESSOR, PROCESSORS) if body.get(name) is not None or xargs.get(name) is not None]
    if not fields:
        return False
    if not path.endswith(_ROUTES):
        raise ValueError(f"{fields[0]}: vLLM calls no processors on the route {path}; leave it out")
    if body.get("use_beam_search"):
        raise ValueError(f"{fields[0]}: vLLM calls no processors in a beam search; leave out one of the two")
    moved = dict(xargs)
    for name in (PROCESSOR, PROCESSORS, PARAMS):
        value = body.pop(name, None)
        if value is not None and xargs.get(name) is not None:
            raise ValueError(f"{name}: give either this or {_XARGS}.{name}, not both")
        value = xargs.get(name) if value is None else value
        if value is not None:
            moved[name] = value if isinstance(value, str) else orjson.dumps(value).decode()
    body[_XARGS] = moved
    return True


def move_mask_fields(body: dict[str, Any], path: str) -> bool:
    """Move the fields of sampling masks to `vllm_xargs`, in place. Does nothing the second time.

    Args:
        body: the request.
        path: its route.

    Returns:
        True if it asks for masks.

    Raises:
        ValueError: a field is malformed or given twice, or the route or a beam search would drop it.
    """
    xargs = body.get(_XARGS) or {}
    fields = {name: body.pop(name) for name in MASK_FIELDS if body.get(name) is not None}
    if not isinstance(xargs, dict) or not (fields or not xargs.keys().isdisjoint(MASK_FIELDS)):
        return False
    if twice := fields.keys() & xargs.keys():
        raise ValueError(f"{min(twice)}: give either this or {_XARGS}.{min(twice)}, not both")
    moved = {**xargs, **fields}
    if moved.get(MASK) not in (None, False, True):
        raise ValueError(f"{MASK}: must be true or false")
    check_mask_fields(moved, "vLLM", returns_lists=False)
    if moved.get(MASK) and not path.endswith(_MASK_ROUTES):
        raise ValueError(f"{MASK}: inside vLLM, only {' and '.join(_MASK_ROUTES)} return masks")
    if moved.get(MASK) and body.get("use_beam_search"):
        raise ValueError(f"{MASK}: is not supported with beam search")
    # vLLM takes no booleans there.
    body[_XARGS] = {name: int(value) if value is True else value for name, value in moved.items() if value is not False}
    return bool(moved.get(MASK))
