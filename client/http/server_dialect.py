"""Which server is at the other end: asked once, when it first matters, and each request then goes out in its words.

`question_before` and `learn` say what to ask and take the answer; the sync and the async client only send.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

import orjson

from logitship.client.errors import APIStatusError, BadRequestError, LogitshipError, NotFoundError

from .http_requests import HttpRequest, get
from .vllm_handshake import QUESTION, PluginInfo
from .vllm_requests import for_vllm, has_processors

ServerKind: TypeAlias = Literal["auto", "logitship", "sglang", "vllm"]

_WHO = get("/v1/models")
"""Every server has this route, in the form of OpenAI's, where `owned_by` names who made the server."""


class ServerDialect:
    """What is known of the server.

    Threads may share it. Two that ask at the same moment both get the same answer.

    Args:
        kind: which server it is; `auto`: ask it. `logitship` and `sglang` take the same requests.

    Raises:
        ValueError: another word.
    """

    def __init__(self, kind: ServerKind) -> None:
        if kind not in get_args(ServerKind):
            raise ValueError(f"dialect: expected one of {', '.join(get_args(ServerKind))}, not {kind!r}")
        self._kind = kind
        self._plugin: PluginInfo | None = None

    def question_before(self, request: HttpRequest) -> HttpRequest | None:
        """What is to be asked before `request` can be translated; None: nothing.

        A request for OpenAI's routes that carries no processor is the same everywhere.
        """
        carries = has_processors(request)
        traced = isinstance(request.json, Mapping) and "trace" in request.json  # vLLM would overlook it
        if self._kind == "auto" and (carries or traced or request.path == "/generate"):
            return _WHO
        if self._kind == "vllm" and carries and self._plugin is None:
            return _plugin_question(request)
        return None

    def learn(self, question: HttpRequest, answer: bytes | APIStatusError) -> None:
        """Take the answer to a question.

        Args:
            answer: the body, or the error that stands for an answer with an error status.

        Raises:
            APIStatusError: the server refused to answer.
            LogitshipError: it is a vLLM without logitship's plugin.
        """
        if question is _WHO:
            self._kind = _read_who(answer)
        else:
            self._plugin = _read_plugin(answer)

    def translate(self, request: HttpRequest) -> HttpRequest:
        """`request` in the server's words, once there is no more question before it.

        Raises:
            ValueError: the server has no words for it; names the argument.
        """
        if self._kind != "vllm":
            return request
        translated = for_vllm(request)
        if self._plugin is not None and has_processors(request):
            return replace(translated, fault_token=self._plugin.fault_token)
        return translated


def _plugin_question(request: HttpRequest) -> HttpRequest:
    body = {"prompt": "?", "max_tokens": 1, "vllm_xargs": QUESTION}
    if "model" in request.json:
        body["model"] = request.json["model"]
    return HttpRequest("POST", "/v1/completions", body, idempotent=True)


def _read_who(answer: bytes | APIStatusError) -> ServerKind:
    """Who made the server. One that does not say is taken for one that speaks SGLang's words, as logitship does."""
    if isinstance(answer, APIStatusError):
        if isinstance(answer, NotFoundError):
            return "logitship"
        raise answer
    return "vllm" if _owner(answer) == "vllm" else "logitship"


def _owner(models: bytes) -> Any:
    try:
        return orjson.loads(models)["data"][0]["owned_by"]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        return None


def _read_plugin(answer: bytes | APIStatusError) -> PluginInfo:
    if isinstance(answer, BadRequestError):
        plugin = PluginInfo.from_message(answer.message)
        if plugin is not None:
            return plugin
    if isinstance(answer, APIStatusError):
        raise answer
    raise LogitshipError(
        "this vLLM runs without logitship's plugin and would ignore the processor: start it with "
        "--logits-processors logitship.server.vllm:LogitshipLogitsProcessor"
    )
