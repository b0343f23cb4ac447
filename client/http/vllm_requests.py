"""Translation of requests for logitship or SGLang into requests for vLLM with logitship's plugin.

Processors are sent in `vllm_xargs`, whose values are strings, numbers or lists of them: structured values are sent as
JSON text. Pure functions; nothing is sent here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson

from .http_requests import HttpRequest

_IN_XARGS = ("custom_logit_processor", "custom_params", "logits_processors")
"""Fields of the body for other servers; keys of `vllm_xargs` for vLLM."""

_SAME_NAME = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "custom_params",
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "min_p",
        "n",
        "presence_penalty",
        "repetition_penalty",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "temperature",
        "thinking_token_budget",
        "top_k",
        "top_p",
    }
)
_OTHER_NAME = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}
_STRUCTURED_OUTPUTS = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
    "whitespace_pattern": "whitespace_pattern",
}
_UNSUPPORTED = {
    "stop_regex": "vLLM does not support stop expressions",
    "logprobs_mode": "on vLLM only the operator can set this (--logprobs-mode)",
    "sampling_logprobs_mode": "on vLLM, sampling masks are packed, with the log-probabilities of the output's tokens",
    "trace": "vLLM does not support traces",
}


def has_processors(request: HttpRequest) -> bool:
    """Return whether the request has processors, or parameters for them."""
    if not isinstance(request.json, Mapping):
        return False
    containers = [request.json, request.json.get("vllm_xargs"), request.json.get("sampling_params")]
    for container in containers:
        for fields in container if isinstance(container, list) else [container]:
            if isinstance(fields, Mapping) and not fields.keys().isdisjoint(_IN_XARGS):
                return True
    return False


def translate_for_vllm(request: HttpRequest) -> HttpRequest:
    """Return the same request for vLLM.

    Args:
        request: a request for `/generate`, `/v1/completions` or `/v1/chat/completions`.

    Raises:
        ValueError: vLLM lacks an option, or gives it another meaning; names the argument.
    """
    body = _completion_of(request.json) if request.path == "/generate" else dict(request.json)
    for name, reason in _UNSUPPORTED.items():
        if name in body:
            raise ValueError(f"{name}: {reason}")
    xargs = _xargs(body)
    if body.get("use_beam_search") and not xargs.keys().isdisjoint(_IN_XARGS):
        raise ValueError("use_beam_search: vLLM's beam search does not call processors and would ignore the request's")
    if xargs:
        body["vllm_xargs"] = xargs
    path = "/v1/completions" if request.path == "/generate" else request.path
    return replace(request, path=path, json=body)


def _completion_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the body of `/generate` to the body of `/v1/completions`."""
    fields = dict(body)
    text, token_ids = fields.pop("text", None), fields.pop("input_ids", None)
    completion: dict[str, Any] = {"prompt": token_ids if text is None else text, "stream": fields.pop("stream")}
    if completion["stream"]:
        completion["stream_options"] = {"include_usage": True}
    completion["return_token_ids"] = True
    completion |= _sampling_fields(fields.pop("sampling_params"))
    if (budget := fields.pop("max_thinking_tokens", None)) is not None:
        completion["thinking_token_budget"] = budget
    completion |= _logprobs(fields)
    if (rid := fields.pop("rid", None)) is not None:
        if not isinstance(rid, str):
            raise ValueError("rid: on vLLM a batch is one request with one id")
        completion["request_id"] = rid
    return completion | fields


def _sampling_fields(sampling: Any) -> dict[str, Any]:
    if isinstance(sampling, list):
        raise ValueError("params: on vLLM all prompts of a batch share them: send one request per prompt")
    fields: dict[str, Any] = {}
    structured: dict[str, Any] = {}
    for name, value in sampling.items():
        if name in _STRUCTURED_OUTPUTS:
            structured[_STRUCTURED_OUTPUTS[name]] = value
        elif name in _SAME_NAME or name in _UNSUPPORTED:
            fields[name] = value
        elif name in _OTHER_NAME:
            fields[_OTHER_NAME[name]] = value
        else:
            raise ValueError(f"{name}: vLLM does not have this sampling parameter")
    if structured:
        fields["structured_outputs"] = structured
    return fields


def _logprobs(fields: dict[str, Any]) -> dict[str, Any]:
    """Remove SGLang's five fields for log-probabilities from `fields`; return vLLM's one."""
    requested = fields.pop("return_logprob", False)
    start, top = fields.pop("logprob_start_len", -1), fields.pop("top_logprobs_num", 0)
    if fields.pop("token_ids_logprob", None):
        raise ValueError(
            "token_ids_logprob: vLLM returns no log-probabilities of tokens by id; see its logprob_token_ids"
        )
    fields.pop("return_text_in_logprobs", None)  # OpenAI's format always includes the text
    if not requested:
        return {}
    if start != -1:
        raise ValueError("logprob_start_len: vLLM only returns log-probabilities of the output (-1)")
    return {"logprobs": top}


def _xargs(body: dict[str, Any]) -> dict[str, Any]:
    """Remove the processors from the body; return them together with its `vllm_xargs`."""
    given = body.pop("vllm_xargs", None) or {}
    processor, params, several = (body.pop(name, None) for name in _IN_XARGS)
    _check_shared(body, processor, several)
    if isinstance(processor, list):
        several = [{"processor": text} for text in processor]
        processor = None
    processors = {
        "custom_logit_processor": processor,
        "custom_params": None if params is None else orjson.dumps(params).decode(),
        "logits_processors": None if several is None else orjson.dumps(several).decode(),
    }
    xargs = {name: value for name, value in processors.items() if value is not None}
    if duplicates := xargs.keys() & given.keys():
        raise ValueError(f"vllm_xargs: {min(duplicates)} is also given by a separate argument")
    return {**given, **xargs}


def _check_shared(body: Mapping[str, Any], processor: Any, several: Any) -> None:
    """Refuse lists with one entry per prompt: on vLLM the prompts of a request share everything else."""
    prompt = body.get("prompt")
    is_batch = isinstance(prompt, list | tuple) and bool(prompt) and not isinstance(prompt[0], int)
    lists = {"processor": isinstance(processor, list), "logits_processors": _has_lists(several)}
    for name, has_lists in lists.items():
        if is_batch and has_lists:
            raise ValueError(f"{name}: on vLLM all prompts of a batch share them: send one request per prompt")


def _has_lists(several: Any) -> bool:
    return bool(several) and all(isinstance(entry, list) for entry in several)
