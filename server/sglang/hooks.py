"""The plugin's hooks around SGLang's functions, in the order in which a request meets them."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import torch

from logitship.server.runtime.fault_message import FAULT_TYPE, fault_details
from logitship.server.runtime.hook_target import HookTarget
from logitship.server.runtime.response_receipts import HTTP_RESPONSES, RECEIPTS, expect_receipts, response_receipts
from logitship.server.runtime.seat import start_engine_worker
from logitship.server.runtime.tracked_request import TrackedRequest
from logitship_sglang import GENERATE, logger

from .edit_recorder import EditRecorder
from .finish_abort import reject
from .forward_step import ForwardStep
from .front_end import FrontEnd
from .generate_fields import SENT, read_body
from .hook_registry import apply_hooks
from .loading_requests import LoadingRequests
from .packed_masks import SAMPLING_EDITS, PackedMasks, requested_masks, take_mask_fields
from .receipt_info import receipts_of, send_receipts
from .sampled_masks import masks_of
from .sampling_ranks import sampling_ranks
from .served_model import served_model
from .sglang_seat import SglangSeat, find_scheduled, scheduled
from .sglang_settings import SglangSettings
from .unsupported import check_configuration, resolved_arguments, skips_processors
from .verify_input import MaskThenEdit, read_trees

Function = Callable[..., Any]

_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
HTTP_SERVER = "sglang.srt.entrypoints.http_server"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
POLL_INTERVAL = 0.001
"""Seconds between two looks at loading processors, while nothing is computed."""
_FRONT_END = "_logitship_front_end"
_steps: SglangSeat | None = None
"""Processors of this process, if it is a scheduler."""
_loading: LoadingRequests | None = None
"""Its requests whose processors are loading."""
_begins_early = False
"""Calls may begin before the model computes."""
_follows_drafts = False
"""SGLang decodes speculatively, in a way that processors can follow."""


def make_front_end(init: Function, manager: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Add admission to a new `TokenizerManager`."""
    arguments = resolved_arguments(server_args)
    if arguments.enable_custom_logit_processor:
        check_configuration(arguments)  # here too: where SGLang loads no plugins, its schedulers do not
    init(manager, server_args, *args, **kwargs)
    if not arguments.enable_custom_logit_processor:
        return
    settings, skips = SglangSettings.from_environment(), skips_processors(arguments)
    if HTTP_SERVER in sys.modules:
        apply_hooks(ROUTES)
        if arguments.enable_metrics:
            METRICS.wrap()
    model = served_model(manager.model_config, arguments)
    speculates = arguments.speculative_algorithm is not None
    front_end = FrontEnd(settings, model, arguments.api_key, skips_processors=skips, speculates=speculates)
    setattr(manager, _FRONT_END, front_end)
    front_end.prepare()
    if HTTP_SERVER in sys.modules:
        from logitship.server.runtime.plugin_uploads import add_upload_routes

        add_upload_routes(sys.modules[HTTP_SERVER].app, settings, front_end.prepared, front_end.caller)


async def keep_processor(json: Function, request: Any) -> Any:
    """Let the routes take processors as objects, and keep those that their schemas drop."""
    body = await json(request)
    read_body(body, request.scope)
    take_mask_fields(body, request.scope)
    if SENT in request.scope and not request.scope["path"].endswith("/generate"):  # it has them in `meta_info`
        expect_receipts()
    return body


def keep_fault(scrub_error_message: Function, message: str, status_code: int) -> Any:
    """Leave the traceback of a processor in an error of the Anthropic route."""
    return message if message.startswith(FAULT_TYPE) else scrub_error_message(message, status_code)


def add_metrics(init: Function, collector: Any, registry: Any, *args: Any, **kwargs: Any) -> None:
    """Let SGLang's `/metrics` have the metrics of processors."""
    init(collector, registry, *args, **kwargs)
    directory = SglangSettings.from_environment().metrics_directory
    if directory is not None:
        from logitship.server.runtime.plugin_metrics import register

        register(registry, directory)


async def admit(generate_request: Function, manager: Any, obj: Any, request: Any = None) -> AsyncIterator[Any]:
    """Check a request's processors before anything else happens to it, and pass on their receipts."""
    front_end = getattr(manager, _FRONT_END, None)
    if front_end is not None:
        await front_end.admit(obj, request)
    receipts, masks = response_receipts(), None
    if front_end is not None and requested_masks(getattr(request, "scope", {})) is not None:
        masks = PackedMasks(
            front_end.vocab_size, partial(_temperature, manager, obj), are_deltas=_are_deltas(manager, obj)
        )
    first_choice = 0 if receipts is None else receipts.reserve(1)
    async with aclosing(generate_request(manager, obj, request)) as responses:
        async for response in responses:
            for number, each in enumerate(response if isinstance(response, list) else [response]):
                index = each.get("index", number)
                if masks is not None:
                    masks.pack(each, index)
                if receipts is not None and RECEIPTS in each["meta_info"]:
                    receipts.add(first_choice + index, each["meta_info"][RECEIPTS])
            yield response


def _temperature(manager: Any, obj: Any, index: int) -> float:
    """Return the temperature of a prompt of SGLang's `GenerateReqInput`."""
    params = obj.sampling_params[index] if isinstance(obj.sampling_params, list) else obj.sampling_params
    temperature: float = ((manager.preferred_sampling_params or {}) | (params or {})).get("temperature", 1.0)
    return temperature


def _are_deltas(manager: Any, obj: Any) -> bool:
    return bool(obj.stream and manager.incremental_streaming_output)


def make_steps(init: Function, scheduler: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Start the executor of the processors next to a new `Scheduler`."""
    global _begins_early, _follows_drafts, _loading, _steps
    arguments = resolved_arguments(server_args)
    if arguments.enable_custom_logit_processor:
        check_configuration(arguments)
        send_receipts()
        if arguments.speculative_algorithm is not None:
            apply_hooks(DRAFTS)
            _follows_drafts = not skips_processors(arguments)
    init(scheduler, server_args, *args, **kwargs)
    if not arguments.enable_custom_logit_processor:
        return
    settings = SglangSettings.from_environment()
    model = served_model(scheduler.model_config, arguments)
    max_rows = scheduler.max_running_requests
    worker = start_engine_worker(settings, model, sampling_ranks(), max_rows, logger, loads_in_background=True)
    _steps = SglangSeat(worker)
    _loading = LoadingRequests(_steps, worker.ranks)
    # With overlap scheduling, the last tokens are not known before the next step begins, except on a CPU.
    _begins_early = not scheduler.enable_overlap or arguments.device == "cpu"
    scheduling = "overlap" if scheduler.enable_overlap else "normal"
    logger.info("logitship runs custom logit processors, with %s scheduling", scheduling)


def wait_for_processors(add: Function, scheduler: Any, req: Any, is_retracted: bool = False) -> None:
    """Let new requests with processors wait until these are loaded. Others are not new, or about to end."""
    is_new = req.custom_logit_processor and find_scheduled(req) is None and not req.to_finish and not req.finished()
    if _loading is None or not is_new:
        add(scheduler, req, is_retracted)
    else:
        scheduled(req)
        _loading.add(req)


def add_loaded(get_next_batch: Function, scheduler: Any, running_batch: Any, last_batch: Any) -> Any:
    """Let SGLang schedule the requests whose processors have been loaded since the last step."""
    if _loading:
        for req, reason in _loading.take_ready():
            if reason is None:
                scheduler._add_request_to_queue(req)
            else:
                logger.warning("request %s ends%s: %s", req.rid, fault_details(scheduled(req)), reason)
                reject(scheduler, req, reason)
        if scheduler.is_fully_idle(for_health_check=True):
            time.sleep(POLL_INTERVAL)
    plan = get_next_batch(scheduler, running_batch=running_batch, last_batch=last_batch)
    if _steps is not None and plan.batch_to_run is None:
        _steps.drop_finished()  # no step follows that would
    return plan


def is_idle(
    is_fully_idle: Function, scheduler: Any, for_health_check: bool = False, ignore_waiting: bool = False
) -> bool:
    """Keep SGLang from sleeping, or from changing its caches, while requests wait for their processors."""
    is_busy = bool(_loading) and not for_health_check
    return not is_busy and bool(is_fully_idle(scheduler, for_health_check, ignore_waiting))


def abort_waiting(abort_request: Function, scheduler: Any, recv_req: Any) -> None:
    """Abort requests that wait for their processors, too."""
    if _loading:
        _loading.abort(scheduler.waiting_queue, partial(abort_request, scheduler, recv_req))
    else:
        abort_request(scheduler, recv_req)


def forward(generate: Function, worker: Any, batch: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Begin the processors' calls before the model computes their logits."""
    if _steps is not None and _begins_early and batch is not None and batch.forward_mode.is_decode():
        rows = _rows(batch.sampling_info)
        if rows:
            _steps.begin(rows, ForwardStep(batch))
    return generate(worker, batch, *args, **kwargs)


def keep_requests(from_schedule_batch: Function, cls: Any, batch: Any, vocab_size: int) -> Any:
    """Put the plugin's records of the requests in the place of their parameters, which SGLang moves with the rows."""
    info = from_schedule_batch(cls, batch, vocab_size)
    if info.has_custom_logit_processor:
        info.custom_params = [scheduled(req) if req.custom_logit_processor else None for req in batch.reqs]
    return info


def sample(sample: Function, runner: Any, logits_output: Any, forward_batch: Any) -> Any:
    """Let the processors know the step that is sampled."""
    if _steps is None:
        return sample(runner, logits_output, forward_batch)
    if not forward_batch.sampling_info.has_custom_logit_processor:
        _steps.plain_step()
        return sample(runner, logits_output, forward_batch)
    edits = EditRecorder(_rows(forward_batch.sampling_info), logits_output.next_token_logits)
    with _steps.sampling(ForwardStep(forward_batch), edits):
        token_ids = sample(runner, logits_output, forward_batch)
    _steps.sampled(token_ids, logits_output, masks_of(forward_batch.sampling_info, logits_output))
    edits.add_to(logits_output, len(token_ids), SAMPLING_EDITS, _steps.called)
    return token_ids


def verify(
    eagle_sample: Function, verify_input: Any, batch: Any, logits_output: Any, grammar_mask: Any = None, **kwargs: Any
) -> Any:
    """Run the processors behind draft tokens, after SGLang's penalties and grammars, and let them know the verdict."""
    rows = {} if _steps is None or batch.forward_mode.is_idle() else _rows(batch.sampling_info)
    if _steps is None or not rows:
        return eagle_sample(verify_input, batch, logits_output, grammar_mask, **kwargs)
    trees = read_trees(verify_input) if _follows_drafts else None
    edit = partial(_steps.apply_to_drafts, rows=rows, trees=trees)
    result = eagle_sample(verify_input, batch, logits_output, MaskThenEdit(grammar_mask, edit), **kwargs)
    _steps.take_accepted(logits_output.next_token_logits, rows, result[2].tolist())
    return result


def needs_verdict(is_disable_overlap_for_batch: Function, scheduler: Any, batch: Any, last_batch: Any) -> bool:
    """Let SGLang process the last step before a step with processors: these need to know the accepted draft tokens."""
    has_processors = bool(batch) and batch.sampling_info is not None and batch.sampling_info.has_custom_logit_processor
    is_pending = has_processors and len(scheduler.result_queue) > 0
    return is_pending or bool(is_disable_overlap_for_batch(scheduler, batch, last_batch))


def apply(
    apply_custom_logit_processor: Function, logits: torch.Tensor, sampling_batch_info: Any, num_tokens_in_batch: int = 1
) -> None:
    """Run the processors in sandboxes."""
    if _steps is None:
        apply_custom_logit_processor(logits, sampling_batch_info, num_tokens_in_batch)  # ends the requests
        return
    _steps.apply(logits, _rows(sampling_batch_info), num_tokens_in_batch)


def _rows(info: Any) -> dict[int, TrackedRequest]:
    """Return the requests with processors, from SGLang's `SamplingBatchInfo`."""
    if not info.has_custom_logit_processor:
        return {}
    return {row: request for row, request in enumerate(info.custom_params) if request is not None}


def supports_sampling_mask(supports_sampling_mask: Function, serialized_processor: str) -> bool:
    """Return True: SGLang takes the masks after all processors. Its own function would unpickle the string."""
    return True


def has_receipts(should_build: Function, streamer: Any) -> bool:
    """Let SGLang ask for the receipts of finished requests."""
    return _steps is not None and _steps.are_used


def add_receipts(build: Function, streamer: Any, reqs: Sequence[Any]) -> dict[str, list[Any]]:
    """Add the receipts of finished requests to what SGLang's scheduler sends to the front end."""
    info: dict[str, list[Any]] = build(streamer, reqs)
    receipts = [receipts_of(req) for req in reqs]
    return {**info, RECEIPTS: receipts} if any(receipts) else info


def keep_receipts(
    update: Function, manager: Any, meta_info: dict[str, Any], state: Any, info: Any, index: int, reason: Any
) -> None:
    """Put the receipts of finished requests into `meta_info` whole. SGLang splits lists among the chunks of streams."""
    left_out = {RECEIPTS}
    if all(each is None for each in info.get(SAMPLING_EDITS, {index: ()})[index]):
        left_out.add(SAMPLING_EDITS)  # those of other requests
    update(manager, meta_info, state, {key: info[key] for key in info if key not in left_out}, index, reason)
    if RECEIPTS in info and info[RECEIPTS][index]:
        meta_info[RECEIPTS] = info[RECEIPTS][index]


TARGETS = (
    HookTarget(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__",
        ["server_args", "port_args", "start_pd_bootstrap_service"],
        make_front_end,
    ),
    HookTarget(GENERATE, ["obj", "request"], admit),
    HookTarget(f"{_SCHEDULER}.__init__", ["server_args", "port_args"], make_steps),
    HookTarget(f"{_SCHEDULER}._add_request_to_queue", ["req", "is_retracted"], wait_for_processors),
    HookTarget(f"{_SCHEDULER}.get_next_batch_to_run", ["running_batch", "last_batch"], add_loaded),
    HookTarget(f"{_SCHEDULER}.is_fully_idle", ["for_health_check", "ignore_waiting"], is_idle),
    HookTarget(f"{_SCHEDULER}.abort_request", ["recv_req"], abort_waiting),
    HookTarget(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
        ["batch", "vocab_size"],
        keep_requests,
    ),
    HookTarget(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        [
            "batch",
            "forward_batch",
            "pp_proxy_tensors",
            "is_verify",
            "skip_attn_backend_init",
            "capture_hidden_mode",
            "return_kv_loc_plan",
        ],
        forward,
    ),
    HookTarget("sglang.srt.model_executor.model_runner.ModelRunner.sample", ["logits_output", "forward_batch"], sample),
    HookTarget(
        "sglang.srt.layers.sampler.apply_custom_logit_processor",
        ["logits", "sampling_batch_info", "num_tokens_in_batch"],
        apply,
    ),
    HookTarget(
        "sglang.srt.sampling.custom_logit_processor.supports_sampling_mask",
        ["serialized_processor"],
        supports_sampling_mask,
    ),
    HookTarget(f"{_STREAMER}.should_build_additional_customized_info", [], has_receipts),
    HookTarget(f"{_STREAMER}.build_additional_customized_info", ["reqs"], add_receipts),
    HookTarget(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
        ["meta_info", "state", "customized_info", "index", "finish_reason"],
        keep_receipts,
    ),
)
ROUTES = (
    HookTarget(f"{HTTP_SERVER}.ORJSONRequest.json", [], keep_processor),
    HookTarget("sglang.srt.entrypoints.anthropic.serving._scrub_error_message", ["message", "status_code"], keep_fault),
    *HTTP_RESPONSES,
)
"""Wrapped only where SGLang serves HTTP."""
METRICS = HookTarget("prometheus_client.multiprocess.MultiProcessCollector.__init__", ["registry", "path"], add_metrics)
"""Collects the metrics of all processes for SGLang's `/metrics`. Wrapped only if it has one."""
DRAFTS = (
    HookTarget(
        "sglang.srt.speculative.eagle_utils.eagle_sample",
        [
            "verify_input",
            "batch",
            "logits_output",
            "grammar_mask",
            "uno_target_max_top_k",
            "watermark_state",
            "watermark_full_mask",
        ],
        verify,
    ),
    HookTarget(f"{_SCHEDULER}.is_disable_overlap_for_batch", ["batch", "last_batch"], needs_verdict),
)
"""Wrapped only if SGLang decodes speculatively. Its workers import the first one after that."""
