"""The plugin's hooks around functions of vLLM's front end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from logitship.client.sampling_record import SamplingRecord
from logitship.server.runtime.fault_message import FAULT_TYPE
from logitship.server.runtime.hook_target import HookTarget, check_targets
from logitship.server.runtime.response_receipts import HTTP_RESPONSES, RECEIPTS, response_receipts
from logitship.server.runtime.shared_directory import make_shared_directory
from logitship.server.schemas.response_schemas import receipt_objects

from .endings import process_outputs, readable
from .extra_args import asks_for_masks
from .output_records import RecordParts
from .params_validation import check, checked, concerns, front_end_processors, prepare
from .request_body import read_json
from .request_tenant import current_tenant, set_tenant, tenant_of_key
from .settings import VllmSettings, logger

Function = Callable[..., Any]

_ASYNC_LLM = "vllm.v1.engine.async_llm.AsyncLLM"
_wrapped: set[str] = set()
"""Paths of the functions that are wrapped."""


def install() -> None:
    """Wrap functions of vLLM in this process.

    Raises:
        ValueError: they are not those that the plugin knows, or a setting is wrong.
    """
    VllmSettings.from_environment()  # an error shows at the start
    try:
        make_shared_directory()
    except OSError as error:
        logger.warning("vLLM's /metrics will lack those of processors, and workers the artifacts of clients: %s", error)
    _wrap(TARGETS)


def _wrap(targets: Sequence[HookTarget]) -> None:
    """Wrap functions once, even if the process makes several engines."""
    new = [target for target in targets if target.path not in _wrapped]
    check_targets(new, "the front ends of vLLM 0.32 and 0.33")
    for target in new:
        target.wrap()
        _wrapped.add(target.path)


def start(init: Function, llm: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Start the sandboxes with the engine, and wrap functions of the HTTP server."""
    header = VllmSettings.from_environment().tenant_header
    tenants = KEY if header is None else _named_by(header)
    _wrap([BODY, RESPONSES, METRICS, *HTTP_RESPONSES, uploads_of(vllm_config), tenants])
    init(llm, vllm_config, *args, **kwargs)
    prepare(vllm_config)


async def add_request(
    add_request: Function, llm: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    """Check a request's processors in a thread before anything else happens to it."""
    if not concerns(params):
        return await add_request(llm, request_id, prompt, params, *args, **kwargs)
    try:
        await check(llm, params)
    except ValueError as error:
        raise _validation_error()(readable(str(error))) from error
    with checked(params):
        return await add_request(llm, request_id, prompt, params, *args, **kwargs)


async def generate(
    generate: Function, llm: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any
) -> AsyncIterator[Any]:
    """Raise faults, which all routes report as errors: with status 400, or as an event of a stream.

    Receipts and sampling records are passed on to the HTTP response.
    """
    receipts, records = response_receipts(), None
    if asks_for_masks(sampling_params):
        records = RecordParts(are_deltas=sampling_params.output_kind.name == "DELTA")
    first_choice = 0 if receipts is None else receipts.reserve(sampling_params.n)
    async with aclosing(generate(llm, prompt, sampling_params, *args, **kwargs)) as outputs:
        async for output in outputs:
            fault = next((each for each in output.outputs if _is_fault(each)), None)
            if fault is None:
                for each in output.outputs:
                    record = None if records is None else _record_of(each, records)
                    if receipts is not None:
                        if finished := getattr(each, RECEIPTS, ()):
                            receipts.add(first_choice + each.index, receipt_objects(finished))
                        if record is not None:
                            receipts.add_record(first_choice + each.index, record)
                yield output
                continue
            text = readable(fault.stop_reason)
            if fault.token_ids:  # those before the fault, which vLLM has merged with its end
                output.finished, fault.finish_reason, fault.stop_reason = False, None, None
                yield output
            raise _validation_error()(text)


async def stream_response(stream: Function, serving: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    """Send errors as an event: in streams of `/v1/responses`, vLLM closes the connection instead."""
    async with aclosing(stream(serving, *args, **kwargs)) as events:
        try:
            async for event in events:
                yield event
        except _validation_error() as error:
            yield serving.create_error_response(error)


def add_metrics(get_registry: Function) -> Any:
    """Let vLLM's `/metrics` have the metrics of processors."""
    registry = get_registry()
    directory = VllmSettings.from_environment().metrics_directory
    if directory is not None:
        from logitship.server.runtime.plugin_metrics import register

        register(registry, directory)
    return registry


def _record_of(completion: Any, records: RecordParts) -> SamplingRecord | None:
    try:
        return records.next(completion)
    except ValueError as error:
        raise _validation_error()(str(error)) from None


def _is_fault(completion: Any) -> bool:
    return completion.finish_reason == "error" and str(completion.stop_reason).startswith(FAULT_TYPE)


def _validation_error() -> type[Exception]:
    """Return vLLM's error with status 400."""
    from vllm.exceptions import VLLMValidationError  # pyright: ignore[reportMissingImports]

    error: type[Exception] = VLLMValidationError
    return error


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
    HookTarget(
        "vllm.v1.engine.output_processor.OutputProcessor.process_outputs",
        ["engine_core_outputs", "engine_core_timestamp", "iteration_stats", "weight_version"],
        process_outputs,
    ),
    HookTarget(
        f"{_ASYNC_LLM}.generate",
        [
            "prompt",
            "sampling_params",
            "request_id",
            "prompt_text",
            "lora_request",
            "tokenization_kwargs",
            "trace_headers",
            "priority",
            "data_parallel_rank",
            "session_id",
            "kv_hints",
            "reasoning_ended",
            "reasoning_parser_kwargs",
        ],
        generate,
    ),
)
BODY = HookTarget("starlette.requests.Request.json", [], read_json)
"""Finds processors in bodies. Wrapped, like the following ones, only where vLLM serves HTTP."""
RESPONSES = HookTarget(
    "vllm.entrypoints.openai.responses.serving.OpenAIServingResponses.responses_stream_generator",
    [
        "request",
        "sampling_params",
        "result_generator",
        "context",
        "model_name",
        "tokenizer",
        "request_metadata",
        "created_time",
    ],
    stream_response,
)
METRICS = HookTarget("vllm.entrypoints.serve.instrumentator.metrics.get_prometheus_registry", [], add_metrics)
KEY = HookTarget(
    "vllm.entrypoints.serve.middleware.authenticate.AuthenticationMiddleware.verify_token", ["headers"], tenant_of_key
)
"""Takes the tenant of each request from its API key."""


def uploads_of(vllm_config: Any) -> HookTarget:
    """Return the hook that adds the routes of uploads to vLLM's HTTP server."""

    def add_uploads(build_app: Function, *args: Any, **kwargs: Any) -> Any:
        from logitship.server.api_keys import Caller
        from logitship.server.runtime.plugin_uploads import add_upload_routes

        app = build_app(*args, **kwargs)
        add_upload_routes(
            app,
            VllmSettings.from_environment(),
            partial(front_end_processors, vllm_config),
            lambda request: Caller(current_tenant(), may_ship=True),
        )
        return app

    # By the name under which vLLM's server calls it.
    path = "vllm.entrypoints.launchers.api_server.entry.build_app"
    return HookTarget(path, ["args", "supported_tasks", "model_config"], add_uploads)


def _named_by(header: str) -> HookTarget:
    """Return the hook that takes the tenant of each HTTP request from a header of a trusted gateway."""
    name = header.lower().encode()

    async def call(call: Function, app: Any, scope: Any, receive: Any, send: Any) -> None:
        tenant = dict(scope.get("headers") or ()).get(name)
        if tenant is not None:
            set_tenant(tenant.decode("latin-1"))
        await call(app, scope, receive, send)

    return HookTarget("fastapi.FastAPI.__call__", ["scope", "receive", "send"], call)
