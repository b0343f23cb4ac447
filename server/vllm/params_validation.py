"""Validation of requests in vLLM's front end, where an error is a 400. In the engine core it would stop the engine."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from logitship.client.http.vllm_handshake import PluginInfo
from logitship.sampler.processors.request_view import ModelView
from logitship.server.runtime.plugin_processors import PluginProcessors, for_admission

from .callers import find_caller
from .configuration import fault_token, model_view
from .extra_args import asks_for_plugin_info, has_processors, read_processors, sampling_params
from .settings import VllmSettings, logger


@dataclass(frozen=True)
class _FrontEnd:
    """The front end's state for one model.

    Attributes:
        vllm_config: referenced, so that no other configuration gets the same `id`.
    """

    vllm_config: Any
    settings: VllmSettings
    model: ModelView
    processors: PluginProcessors
    fault_token: int


_front_ends: dict[int, _FrontEnd] = {}
_lock = threading.Lock()


def admit(params: Any) -> None:
    """Check the processors of a request by loading them once, and add the stop token with which the plugin ends it.

    Args:
        params: vLLM's `SamplingParams`; gets another stop token if the request has processors.

    Raises:
        ValueError: a processor cannot run, or the request asks for the plugin's description; the message is for the
            client.
    """
    asks = asks_for_plugin_info(params)
    if not asks and not has_processors(params):
        return
    front_end = _front_end()
    if asks:
        raise ValueError(PluginInfo(front_end.fault_token).to_message())
    requested = read_processors(params.extra_args, front_end.settings.max_processor_size)
    uses = front_end.processors.load(requested, "admission")
    try:
        sampling_params(params, uses, front_end.model.eos_token_ids)  # it raises for values that only vLLM accepts
    finally:
        front_end.processors.release(uses)
    stop_token_ids = params.stop_token_ids or []
    if front_end.fault_token not in stop_token_ids:
        params.stop_token_ids = [*stop_token_ids, front_end.fault_token]


def _front_end() -> _FrontEnd:
    caller = find_caller("InputProcessor")
    if caller is None:
        raise ValueError("logitship does not support this version of vLLM: it cannot find the model's configuration")
    config = caller.vllm_config
    with _lock:  # the first request of each model starts the sandboxes; others wait for that
        if id(config) not in _front_ends:
            settings, model = VllmSettings.from_environment(), model_view(config)
            processors = for_admission(settings, model, logger)
            _front_ends[id(config)] = _FrontEnd(config, settings, model, processors, fault_token(model))
        return _front_ends[id(config)]
