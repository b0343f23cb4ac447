"""Translation of requests for logitship into requests for SGLang, with or without logitship's plugin.

SGLang has a field for one processor. The plugin reads several from it, as the JSON text of a list. Pure functions;
nothing is sent here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from .http_requests import HttpRequest, is_many

_FIELD, _SEVERAL = "custom_logit_processor", "logits_processors"


def has_several(request: HttpRequest) -> bool:
    """Return whether a prompt of the request has a list of processors."""
    body = request.json
    if not isinstance(body, Mapping):
        return False
    processor = body.get(_FIELD)
    per_prompt = processor if _is_batch(body) else [processor]
    return bool(body.get(_SEVERAL)) or (
        isinstance(per_prompt, list) and any(isinstance(each, list) and each for each in per_prompt)
    )


def packs_masks(request: HttpRequest) -> bool:
    """Return whether the request asks for packed sampling masks."""
    return isinstance(request.json, Mapping) and request.json.get("sampling_mask_format") == "packed"


def translate_for_sglang(request: HttpRequest, *, has_plugin: bool) -> HttpRequest:
    """Return the same request for SGLang.

    Args:
        request: a request for any route.
        has_plugin: SGLang runs logitship's plugin.

    Raises:
        ValueError: SGLang would ignore a field, or cannot take it; names the argument.
    """
    body = request.json
    if not isinstance(body, Mapping):
        return request
    if packs_masks(request) and not (has_plugin and request.path == "/generate"):
        raise ValueError(
            "sampling_mask_format: SGLang packs masks only with logitship's plugin, and only in `generate`"
        )
    if "trace" in body:
        raise ValueError("trace: SGLang does not support traces")
    processor, several = body.get(_FIELD), body.get(_SEVERAL)
    name = "processor" if several is None else _SEVERAL
    if processor is not None and several is not None:
        raise ValueError(f"{_SEVERAL}: give either this or processor, not both")
    if has_several(request) and not has_plugin:
        raise ValueError(f"{name}: only SGLang with logitship's plugin runs several processors (docs/sglang.md)")
    string = _string_of_entries(several, _is_batch(body)) if processor is None else _string(processor, _is_batch(body))
    if isinstance(string, list) and request.path == "/v1/completions":
        raise ValueError(f"{name}: in SGLang's completions all prompts share them; `generate` takes one per prompt")
    others = {field: value for field, value in body.items() if field not in (_FIELD, _SEVERAL)}
    return replace(request, json=others if string is None else {**others, _FIELD: string})


def _is_batch(body: Mapping[str, Any]) -> bool:
    prompt = body.get("text", body.get("input_ids", body.get("prompt")))
    return bool(prompt) and is_many(prompt, None)


def _string(processor: Any, is_batch: bool) -> Any:
    """Convert `custom_logit_processor`; for a batch, a list has one entry per prompt."""
    if not isinstance(processor, list):
        return processor
    if is_batch:
        return [_string(each, is_batch=False) for each in processor]
    return _json([{"processor": string} for string in processor])


def _string_of_entries(several: Any, is_batch: bool) -> Any:
    """Convert `logits_processors`; for a batch, a list of lists has one entry per prompt."""
    if is_batch and isinstance(several, list) and several and all(isinstance(each, list) for each in several):
        return [_json(each) for each in several]
    return _json(several)


def _json(entries: Sequence[Any] | None) -> str | None:
    return orjson.dumps(entries).decode() if entries else None
