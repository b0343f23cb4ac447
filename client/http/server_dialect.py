"""Detection of the server, and translation of requests into its dialect.

`ServerDialect` does no I/O: `probe_before` returns the request to send and `handle_probe` takes the response, so
that the sync and the async client share it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

import orjson

from logitship.client.errors import (
    APIStatusError,
    BadRequestError,
    LogitshipError,
    NotFoundError,
    ProcessorSerializationError,
)
from logitship_sglang import REFUSES_ALL

from .http_requests import HttpRequest, get
from .sglang_handshake import NOT_ENABLED, PROBE_BODY, SglangPlugin
from .sglang_requests import has_several, packs_masks, translate_for_sglang
from .vllm_handshake import PROBE, PluginInfo
from .vllm_requests import has_processors, translate_for_vllm

ServerKind: TypeAlias = Literal["auto", "logitship", "sglang", "vllm"]

_RECORDS = frozenset(("return_sampling_mask", "trace"))
"""Fields for records of the answer's tokens, which some servers would ignore."""
_MODELS_PROBE = get("/v1/models")
"""Every server has OpenAI's route, where `owned_by` names the server software."""

_LIMIT_PROBE = get("/server_info")
_MIN_LIMIT = 1 << 20
"""Bytes of a processor string that every server of logitship takes, unless its operator lowered the limit."""

_SGLANG_PROBE = HttpRequest("POST", "/generate", PROBE_BODY, idempotent=True)


class ServerDialect:
    """Dialect of one server, detected when it is first needed.

    Safe to share between threads: two that probe at the same time get the same result.

    Args:
        kind: the server; `auto`: detect it.
        address: host and port of the server, for warnings.

    Raises:
        ValueError: `kind` is unknown.
    """

    def __init__(self, kind: ServerKind, address: str) -> None:
        if kind not in get_args(ServerKind):
            raise ValueError(f"dialect: expected one of {', '.join(get_args(ServerKind))}, not {kind!r}")
        self._kind = kind
        self._address = address
        self._plugin: PluginInfo | None = None
        self._is_detected = kind == "auto"
        self._has_sglang_plugin: bool | None = None
        """True if SGLang runs logitship's plugin; None: not known yet."""
        self._limit: float | None = None
        """Most bytes of a processor string; None: not known yet."""

    def probe_before(self, request: HttpRequest) -> HttpRequest | None:
        """Return the request to send before `request` can be translated; None: it can be translated now.

        A request without processors for OpenAI's routes is the same on all servers.
        """
        uses_processors = has_processors(request)
        records = isinstance(request.json, Mapping) and not request.json.keys().isdisjoint(_RECORDS)
        if self._kind == "auto" and (uses_processors or records or request.path == "/generate"):
            return _MODELS_PROBE
        if self._kind == "vllm" and (uses_processors or records) and self._plugin is None:
            return _plugin_probe(request)
        # If the caller said that it is SGLang, one processor, which is sent as it is, is no reason to ask.
        needs_plugin = (uses_processors and self._is_detected) or has_several(request) or packs_masks(request)
        if self._kind == "sglang" and needs_plugin and self._has_sglang_plugin is None:
            return _SGLANG_PROBE
        is_large = request.largest is not None and request.largest.size > _MIN_LIMIT
        if is_large and self._kind == "auto":
            return _MODELS_PROBE
        if is_large and self._kind == "logitship" and self._limit is None:
            return _LIMIT_PROBE
        return None

    def handle_probe(self, probe: HttpRequest, response: bytes | APIStatusError) -> None:
        """Store the result of a probe.

        Args:
            probe: the request from `probe_before`.
            response: the body, or the error for a response with an error status.

        Raises:
            APIStatusError: the server did not answer the probe.
            LogitshipError: the server is vLLM without logitship's plugin.

        Warns:
            UserWarning: the server is SGLang without logitship's plugin, and unpickles processors.
        """
        if probe is _MODELS_PROBE:
            self._kind = _parse_kind(response)
        elif probe is _LIMIT_PROBE:
            self._limit = _parse_limit(response)
        elif probe is _SGLANG_PROBE:
            self._has_sglang_plugin = _parse_sglang_plugin(response, self._address)
        else:
            self._plugin = _parse_plugin(response)

    def translate(self, request: HttpRequest) -> HttpRequest:
        """Translate `request` into the server's dialect, after all probes.

        Raises:
            ValueError: the server does not support it; names the argument.
            ProcessorSerializationError: the string of a class is too long for the server; names its largest contents.
        """
        if self._limit is not None and request.largest is not None:
            message = request.largest.message(self._limit)
            if message is not None:
                raise ProcessorSerializationError(message)
        if self._kind == "sglang":
            return translate_for_sglang(request, has_plugin=bool(self._has_sglang_plugin))
        if self._kind != "vllm" or request.path.startswith("/v1/processors"):
            return request
        translated = translate_for_vllm(request)
        if self._plugin is not None and has_processors(request):
            return replace(translated, fault_token=self._plugin.fault_token)
        return translated


def _parse_limit(response: bytes | APIStatusError) -> float:
    """Return the longest processor string; infinity if the server does not say."""
    if isinstance(response, APIStatusError):
        return math.inf
    try:
        limit = orjson.loads(response)["max_processor_size"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return math.inf
    return limit if isinstance(limit, int) else math.inf


def _plugin_probe(request: HttpRequest) -> HttpRequest:
    body = {"prompt": "?", "max_tokens": 1, "vllm_xargs": PROBE}
    if "model" in request.json:
        body["model"] = request.json["model"]
    return HttpRequest("POST", "/v1/completions", body, idempotent=True)


def _parse_kind(response: bytes | APIStatusError) -> ServerKind:
    """Return the kind of the server. An unknown server is assumed to accept SGLang's requests, as logitship does."""
    if isinstance(response, APIStatusError):
        if isinstance(response, NotFoundError):
            return "logitship"
        raise response
    owner = _owner(response)
    return owner if owner in ("vllm", "sglang") else "logitship"


def _owner(models: bytes) -> Any:
    try:
        return orjson.loads(models)["data"][0]["owned_by"]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        return None


def _parse_plugin(response: bytes | APIStatusError) -> PluginInfo:
    if isinstance(response, BadRequestError):
        plugin = PluginInfo.from_message(response.message)
        if plugin is not None:
            return plugin
    if isinstance(response, APIStatusError):
        raise response
    raise LogitshipError(
        "this vLLM runs without logitship's plugin and would ignore the processor: start it with "
        "--logits-processors logitship.server.vllm:LogitshipLogitsProcessor"
    )


def _parse_sglang_plugin(response: bytes | APIStatusError, address: str) -> bool:
    """Return whether the plugin replied. Warn if it did not, and the server would unpickle a processor.

    Raises:
        APIStatusError: the plugin could not be installed and refuses all processors, or the server did not answer.
    """
    if isinstance(response, BadRequestError):
        if SglangPlugin.from_message(response.message) is not None:
            return True
        if NOT_ENABLED in response.message:
            return False
        if REFUSES_ALL in response.message:
            raise response
    elif isinstance(response, APIStatusError):
        raise response
    # Python shows a text once, whatever the server: so it has the address.
    warnings.warn(
        f"the SGLang at {address} unpickles processors in its own processes, where any client can run code, and a "
        "class that raises ends the server: install logitship's plugin there (docs/sglang.md)",
        stacklevel=2,
    )
    return False
