"""Refuses requests in vLLM's front end, where that is a 400. In the engine core it would be the end of the engine."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from logitship.client.http.vllm_wire import PluginInfo

from .callers import calling
from .extra_args import has_processors, is_question
from .model_view import fault_token, model_view
from .plugin_processors import PluginProcessors, for_admission
from .settings import PluginSettings


@dataclass(frozen=True)
class _FrontEnd:
    """What the front end of one model knows.

    Attributes:
        vllm_config: kept, so that no other configuration gets its `id`.
    """

    vllm_config: Any
    processors: PluginProcessors
    fault_token: int


_front_ends: dict[int, _FrontEnd] = {}
_lock = threading.Lock()


def admit(params: Any) -> None:
    """Check what a request carries, by loading it on trial, and make it one that the plugin can end.

    Args:
        params: vLLM's `SamplingParams`; gets another stop token if the request carries processors.

    Raises:
        ValueError: it carries something that cannot run, or asks what the plugin is; the message is for the client.
    """
    asked = is_question(params)
    if not asked and not has_processors(params):
        return
    front_end = _front_end()
    if asked:
        raise ValueError(PluginInfo(front_end.fault_token).to_message())
    front_end.processors.release(front_end.processors.load(params, "admission"))
    stop_token_ids = params.stop_token_ids or []
    if front_end.fault_token not in stop_token_ids:
        params.stop_token_ids = [*stop_token_ids, front_end.fault_token]


def _front_end() -> _FrontEnd:
    caller = calling("InputProcessor")
    if caller is None:
        raise ValueError("this version of vLLM is one that logitship does not know: it cannot find the model's name")
    config = caller.vllm_config
    with _lock:  # the first request of each model starts what loads processors; others wait for that
        if id(config) not in _front_ends:
            model = model_view(config)
            processors = for_admission(PluginSettings.from_environment(), model)
            _front_ends[id(config)] = _FrontEnd(config, processors, fault_token(model))
        return _front_ends[id(config)]
