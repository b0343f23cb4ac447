"""Requests in vLLM's words: from the body for a logitship or SGLang server to one for vLLM with logitship's plugin.

Processors travel in `vllm_xargs`, whose values are texts, numbers or lists of them: what has more structure goes as
JSON text. Pure functions; nothing is sent here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson

from .http_requests import HttpRequest

_IN_XARGS = ("custom_logit_processor", "custom_params", "logits_processors")
"""Fields of the body on other servers; keys of `vllm_xargs` here."""

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
_STRUCTURED_OUTPUTS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
_UNKNOWN_TO_VLLM = {
    "stop_regex": "vLLM has no stop expressions",
    "logprobs_mode": "on vLLM this is the operator's choice (--logprobs-mode)",
    "trace": "vLLM makes no traces",
}


def has_processors(request: HttpRequest) -> bool:
    """Whether it has processors, or parameters for them."""
    if not isinstance(request.json, Mapping):
        return False
    places = [request.json, request.json.get("vllm_xargs"), request.json.get("sampling_params")]
    for place in places:
        for fields in place if isinstance(place, list) else [place]:
            if isinstance(fields, Mapping) and not fields.keys().isdisjoint(_IN_XARGS):
                return True
    return False


def for_vllm(request: HttpRequest) -> HttpRequest:
    """The same request for vLLM.

    Args:
        request: one for `/generate`, `/v1/completions` or `/v1/chat/completions`.

    Raises:
        ValueError: it asks for something that vLLM has not, or means otherwise; names the argument.
    """
    body = _completion_of(request.json) if request.path == "/generate" else dict(request.json)
    for name, reason in _UNKNOWN_TO_VLLM.items():
        if name in body:
            raise ValueError(f"{name}: {reason}")
    xargs = _xargs(body)
    if body.get("use_beam_search") and not xargs.keys().isdisjoint(_IN_XARGS):
        raise ValueError("use_beam_search: vLLM's beam search calls no processors and would ignore the request's")
    if xargs:
        body["vllm_xargs"] = xargs
    path = "/v1/completions" if request.path == "/generate" else request.path
    return replace(request, path=path, json=body)


def _completion_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of `/generate` as one of `/v1/completions`."""
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
            raise ValueError("rid: on vLLM a batch is one request, with one id")
        completion["request_id"] = rid
    return completion | fields


def _sampling_fields(sampling: Any) -> dict[str, Any]:
    if isinstance(sampling, list):
        raise ValueError("params: on vLLM all prompts of a batch have the same: send one request a prompt")
    fields: dict[str, Any] = {}
    structured: dict[str, Any] = {}
    for name, value in sampling.items():
        if name in _STRUCTURED_OUTPUTS:
            structured[_STRUCTURED_OUTPUTS[name]] = value
        elif name in _SAME_NAME or name in _UNKNOWN_TO_VLLM:
            fields[name] = value
        elif name in _OTHER_NAME:
            fields[_OTHER_NAME[name]] = value
        else:
            raise ValueError(f"{name}: vLLM has no such sampling parameter")
    if structured:
        fields["structured_outputs"] = structured
    return fields


def _logprobs(fields: dict[str, Any]) -> dict[str, Any]:
    """SGLang's four fields for log-probabilities, taken out of `fields`, as vLLM's one."""
    wanted = fields.pop("return_logprob", False)
    start, top = fields.pop("logprob_start_len", -1), fields.pop("top_logprobs_num", 0)
    fields.pop("return_text_in_logprobs", None)  # OpenAI's format always has the texts
    if not wanted:
        return {}
    if start != -1:
        raise ValueError("logprob_start_len: on vLLM only the output's log-probabilities can be asked for (-1)")
    return {"logprobs": top}


def _xargs(body: dict[str, Any]) -> dict[str, Any]:
    """The processors of a body, taken out of it, and the `vllm_xargs` that it had."""
    given = body.pop("vllm_xargs", None) or {}
    processor, params, several = (body.pop(name, None) for name in _IN_XARGS)
    _check_one_for_all(body, processor, several)
    if isinstance(processor, list):
        several = [{"processor": text} for text in processor]
        processor = None
    _refuse_registered("processor", processor)
    for entry in several or ():
        if isinstance(entry, Mapping):
            _refuse_registered("logits_processors", entry.get("processor"))
    ours = {
        "custom_logit_processor": processor,
        "custom_params": None if params is None else orjson.dumps(params).decode(),
        "logits_processors": None if several is None else orjson.dumps(several).decode(),
    }
    xargs = {name: value for name, value in ours.items() if value is not None}
    if twice := xargs.keys() & given.keys():
        raise ValueError(f"vllm_xargs: {min(twice)} was given by an argument of its own, too")
    return {**given, **xargs}


def _check_one_for_all(body: Mapping[str, Any], processor: Any, several: Any) -> None:
    """Lists with one entry a prompt have no form on vLLM, where the prompts of a request share everything else."""
    prompt = body.get("prompt")
    is_batch = isinstance(prompt, list | tuple) and not isinstance(prompt[0], int)
    lists = {"processor": isinstance(processor, list), "logits_processors": _has_lists(several)}
    for name, has_lists in lists.items():
        if is_batch and has_lists:
            raise ValueError(f"{name}: on vLLM all prompts of a batch have the same: send one request a prompt")


def _has_lists(several: Any) -> bool:
    return bool(several) and all(isinstance(entry, list) for entry in several)


def _refuse_registered(name: str, text: Any) -> None:
    try:
        form = orjson.loads(text) if isinstance(text, str) else None
    except orjson.JSONDecodeError:
        return  # the server says what is wrong with it
    if not isinstance(form, dict):
        return
    registered = form.get("digest", form.get("name"))
    if "digest" in form or "@" in str(registered):
        raise ValueError(f"{name}: vLLM keeps no registered processors: send the class instead of {registered!r}")
