"""The plugin for vLLM's model runner V2, in that one's interface. The rest is the same as for V1."""

from __future__ import annotations

from collections.abc import Collection
from inspect import signature
from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor import (  # pyright: ignore[reportMissingImports]
    LogitsContext,
    LogitsProcessor,
    LogitsProcRequestState,
)

from .callers import argument_of_caller, calling
from .model_view import fault_token, model_view
from .params_validation import admit
from .plugin_processors import for_execution
from .settings import PluginSettings
from .shipped_batch import ShippedBatch
from .slot_batch import SlotBatch
from .slot_requests import SlotRequests
from .tensor_parallel import TensorParallelRanks

_SCHEDULED = "scheduler_output"
"""The argument of the model runner's `add_requests`."""


class LogitshipLogitsProcessorV2(LogitsProcessor):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Runs the processors that came with requests, each on the rows of its own requests."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Called in the front end, before vLLM takes a request.

        Raises:
            ValueError: it is refused with status 400 and this message.
        """
        admit(sampling_params)

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        """Start what processors run in.

        Raises:
            ValueError: a setting is wrong, or vLLM was set up in a way in which processors would not see the output.
        """
        refuse_what_cannot_be_exact(vllm_config)
        self._runner = calling("GPUModelRunner")
        if not _is_known(self._runner):
            raise ValueError("logitship does not know the model runner of this vLLM: it knows that of 0.32")
        settings = PluginSettings.from_environment()
        model = model_view(vllm_config)
        ranks = TensorParallelRanks()
        # All ranks of the last stage draw, and must draw the same: one runs the processors, the others take its rows.
        runs = ranks.is_first and self._runner.is_last_pp_rank
        processors = for_execution(settings, model, req_states.max_num_reqs) if runs else None
        requests = SlotRequests()
        batch = ShippedBatch(model, req_states.device, processors, requests, fault_token(model), ranks)
        self._slots = SlotBatch(req_states, requests, batch, reads=runs)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """A request got a slot. False if it carries no processors."""
        return self._slots.add_request(req_idx, self._runner.req_states.index_to_req_id[req_idx], sampling_params)

    def apply_staged_writes(self) -> None:
        """Called once a step, after the requests that came: let go of those that finished."""
        self._slots.forget(_finished())

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Edit `logits`, float32 [rows, vocab], in place."""
        self._slots.apply(logits, ctx)
        return logits


def _is_known(runner: Any) -> bool:
    """Whether it has what is read of it, so that this shows at start and not with the first request."""
    has_all = all(hasattr(runner, name) for name in ("add_requests", "is_last_pp_rank", "req_states"))
    return (
        has_all
        and hasattr(runner.req_states, "index_to_req_id")
        and _SCHEDULED in signature(runner.add_requests).parameters
    )


def refuse_what_cannot_be_exact(vllm_config: Any) -> None:
    """Check at start that each request will have one row, on a rank that sees all rows.

    Raises:
        ValueError: it will not; names vLLM's option.
    """
    parallel = vllm_config.parallel_config
    refused = {
        "speculative decoding (--speculative-config)": vllm_config.speculative_config is not None,
        "diffusion models": vllm_config.model_config.is_diffusion,
        "prefill context parallelism (--prefill-context-parallel-size)": parallel.prefill_context_parallel_size > 1,
        "batch-sharded sampling (--enable-batch-sharded-sampling)": parallel.enable_batch_sharded_sampling,
    }
    for option, is_on in refused.items():
        if is_on:
            raise ValueError(
                f"logitship cannot run with {option}: it needs all requests on one rank, each with one row"
            )


def _finished() -> Collection[str]:
    """Ids of the requests that finished before this step.

    The model runner takes the slots of those that it puts aside in the same way. Only what the scheduler said to it
    tells them apart.
    """
    finished: Collection[str] = argument_of_caller(_SCHEDULED).finished_req_ids
    return finished
