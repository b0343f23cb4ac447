"""The plugin's hooks around functions of vLLM's front end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from logitship.server.runtime.hook_target import HookTarget, check_targets

from .params_validation import check, checked, concerns, prepare

Function = Callable[..., Any]

_ASYNC_LLM = "vllm.v1.engine.async_llm.AsyncLLM"
_is_installed = False


def install() -> None:
    """Wrap functions of vLLM in this process.

    Raises:
        ValueError: they are not those that the plugin knows.
    """
    global _is_installed
    if _is_installed:
        return
    check_targets(TARGETS, "the front ends of vLLM 0.32 and 0.33")
    for target in TARGETS:
        target.wrap()
    _is_installed = True


def start(init: Function, llm: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Start the sandboxes with the engine."""
    init(llm, vllm_config, *args, **kwargs)
    prepare(vllm_config)


async def add_request(
    add_request: Function, llm: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    """Check a request's processors in a thread before anything else happens to it."""
    if not concerns(params):
        return await add_request(llm, request_id, prompt, params, *args, **kwargs)
    try:
        await check(llm.vllm_config, params)
    except ValueError as error:
        from vllm.exceptions import VLLMValidationError  # pyright: ignore[reportMissingImports]

        raise VLLMValidationError(str(error)) from error
    with checked(params):
        return await add_request(llm, request_id, prompt, params, *args, **kwargs)


TARGETS = (
    HookTarget(
        f"{_ASYNC_LLM}.__init__",
        [
            "vllm_config",
            "executor_class",
            "log_stats",
            "usage_context",
            "mm_registry",
            "log_requests",
            "start_engine_loop",
            "stat_loggers",
            "aggregate_engine_logging",
            "client_addresses",
            "client_count",
            "client_index",
            "profiler",
        ],
        start,
    ),
    HookTarget(
        f"{_ASYNC_LLM}.add_request",
        [
            "request_id",
            "prompt",
            "params",
            "arrival_time",
            "lora_request",
            "tokenization_kwargs",
            "trace_headers",
            "priority",
            "data_parallel_rank",
            "session_id",
            "prompt_text",
            "reasoning_ended",
            "reasoning_parser_kwargs",
            "kv_hints",
        ],
        add_request,
    ),
)
