"""Validation of requests in vLLM's front end, where an error is a 400. In the engine core it would stop the engine.

Requests of `AsyncLLM`, which all HTTP routes use, are checked in threads before it adds them (`check`). Others are
checked where vLLM validates their parameters (`admit`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from logitship.client.http.vllm_handshake import PluginInfo
from logitship.sampler.processors.request_view import ModelView
from logitship.server.requests.messages import ProcessorRequest
from logitship.server.runtime.plugin_processors import PluginProcessors
from logitship.server.runtime.plugin_setup import for_admission
from logitship.server.runtime.request_fields import MASK, MASK_FIELDS, check_mask_fields

from .callers import find_caller
from .configuration import fault_token, model_view
from .extra_args import (
    asks_for_masks,
    asks_for_plugin_info,
    has_processors,
    read_processors,
    sampling_params,
    with_default_processors,
    with_processors,
)
from .request_tenant import current_tenant, write_tenant
from .settings import VllmSettings, logger
from .worker_loads import WorkerLoads


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
    worker_loads: WorkerLoads = field(default_factory=WorkerLoads)

    def read(self, params: Any) -> tuple[ProcessorRequest, ...]:
        """Check a request, and parse its processors, if it has any. Its parameters get the strings of registered ones.

        Raises:
            ValueError: as `admit`.
        """
        if asks_for_plugin_info(params):
            raise ValueError(PluginInfo(self.fault_token).to_message())
        check_mask_fields(params.extra_args or {}, "vLLM", returns_lists=False)
        if asks_for_masks(params) and self.vllm_config.speculative_config is not None:
            raise ValueError(f"{MASK}: inside vLLM, it is not supported with speculative decoding")
        if self.settings.default_processors:
            if has_processors(params):
                read_processors(params.extra_args, self.settings.max_processor_size)  # its own mistakes, by their place
            params.extra_args = with_default_processors(params.extra_args, self.settings.default_processors)
        if not has_processors(params):
            return ()
        requested = read_processors(params.extra_args, self.settings.max_processor_size)
        sampling_params(params, (), self.model.eos_token_ids)  # it raises for values that only vLLM accepts
        resolved = self.processors.resolve(requested, current_tenant())
        if resolved is not requested:
            params.extra_args = with_processors(params.extra_args, resolved)
        return resolved

    def accept(self, params: Any) -> None:
        """Write the tenant into a request, and add the stop token with which the plugin ends it."""
        write_tenant(params, current_tenant())
        stop_token_ids = params.stop_token_ids or []
        if self.fault_token not in stop_token_ids:
            params.stop_token_ids = [*stop_token_ids, self.fault_token]


_front_ends: dict[int, _FrontEnd] = {}
_lock = threading.Lock()
_checked: Counter[int] = Counter()
"""Identities of parameters that `check` has checked and that vLLM validates now. No client can forge one."""
_checks_async_requests = False
"""`AsyncLLM` calls `check`."""


def admit(params: Any) -> None:
    """Check the processors of a request unless `check` did, and add the stop token with which the plugin ends it.

    Args:
        params: vLLM's `SamplingParams`; gets another stop token if the request has processors.

    Raises:
        ValueError: a processor cannot run, or the request asks for the plugin's description; the message is for the
            client.
    """
    if not concerns(params) or id(params) in _checked:
        return
    caller = find_caller("InputProcessor")
    if caller is None:
        raise ValueError("logitship does not support this version of vLLM: it cannot find the model's configuration")
    if not _checks_async_requests and not asks_for_plugin_info(params) and find_caller("AsyncLLM") is not None:
        raise ValueError(
            "this server did not load logitship's entry point `vllm.general_plugins`: install logitship in its "
            "environment with pip, and add it to VLLM_PLUGINS if that is set"
        )
    front_end = _front_end(caller.vllm_config)
    if requested := front_end.read(params):
        front_end.processors.release(front_end.processors.load(requested, "admission", current_tenant()))
        front_end.accept(params)


async def check(llm: Any, params: Any) -> None:
    """Do the same for a request of vLLM's `AsyncLLM` in threads, and wait until its workers have loaded the processors.

    Raises:
        ValueError: as `admit`.
    """
    front_end = await asyncio.to_thread(_front_end, llm.vllm_config)
    requested = await asyncio.to_thread(front_end.read, params)
    if not requested:
        return
    tenant = current_tenant()
    await front_end.processors.check(requested, tenant)
    front_end.accept(params)
    names = front_end.processors.group_names(requested, tenant)
    await front_end.worker_loads.wait(llm, params.extra_args, names)


@contextmanager
def checked(params: Any) -> Iterator[None]:
    """Enclose the time in which vLLM validates parameters that `check` has checked."""
    _checked[id(params)] += 1
    try:
        yield
    finally:
        _checked[id(params)] -= 1
        if not _checked[id(params)]:
            del _checked[id(params)]


def concerns(params: Any) -> bool:
    """Return True if a request has processors or every one has, or if it asks for masks or the plugin's description."""
    if not hasattr(params, "extra_args") or not hasattr(params, "temperature"):
        return False  # it generates nothing
    asks = asks_for_plugin_info(params) or not (params.extra_args or {}).keys().isdisjoint(MASK_FIELDS)
    return asks or has_processors(params) or _settings_have_defaults()


@cache
def _settings_have_defaults() -> bool:
    return bool(VllmSettings.from_environment().default_processors)


def prepare(vllm_config: Any) -> None:
    """Start the sandboxes of a front end in a thread. The first request with a processor waits for them."""
    global _checks_async_requests
    _checks_async_requests = True
    threading.Thread(target=_front_end, args=(vllm_config,), name="logitship-prepare", daemon=True).start()


def front_end_processors(vllm_config: Any) -> PluginProcessors:
    """Return the processors of a front end. The first call waits until its sandboxes have started.

    Raises:
        ValueError: they cannot start.
    """
    return _front_end(vllm_config).processors


def _front_end(config: Any) -> _FrontEnd:
    with _lock:  # the first call starts the sandboxes; others wait for that
        if id(config) not in _front_ends:
            settings, model = VllmSettings.from_environment(), model_view(config)
            processors = for_admission(settings, model, logger)
            _front_ends[id(config)] = _FrontEnd(config, settings, model, processors, fault_token(model))
        return _front_ends[id(config)]
