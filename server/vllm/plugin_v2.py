"""The plugin for vLLM's model runner V2."""

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

from .callers import find_caller, find_caller_argument
from .model_view import fault_token, model_view
from .params_validation import admit
from .plugin_processors import for_execution
from .settings import PluginSettings
from .shipped_batch import ShippedBatch
from .slot_batch import SlotBatch
from .slot_requests import SlotRequests
from .tensor_parallel import TensorParallelRanks

_SCHEDULED = "scheduler_output"
"""Name of the argument of the model runner's `add_requests`."""


class LogitshipLogitsProcessorV2(LogitsProcessor):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Runs the processors of requests, each on the rows of its own requests."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Check a request in the front end, before vLLM admits it.

        Raises:
            ValueError: the request is refused with status 400 and this message.
        """
        admit(sampling_params)

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        """Start the executor of the processors.

        Raises:
            ValueError: a setting is wrong, or vLLM is configured so that processors would not see the output.
        """
        check_supported(vllm_config)
        self._runner = find_caller("GPUModelRunner")
        if not _is_known(self._runner):
            raise ValueError("logitship does not know the model runner of this vLLM: it knows that of 0.32")
        settings = PluginSettings.from_environment()
        model = model_view(vllm_config)
        ranks = TensorParallelRanks()
        # All ranks of the last stage sample, and must sample the same: the first runs the processors and broadcasts.
        runs = ranks.is_first and self._runner.is_last_pp_rank
        processors = for_execution(settings, model, req_states.max_num_reqs) if runs else None
        requests = SlotRequests()
        batch = ShippedBatch(model, req_states.device, processors, requests, fault_token(model), ranks)
        self._slots = SlotBatch(req_states, requests, batch, reads=runs)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Add a request that was given a slot. Return False if it has no processors."""
        return self._slots.add_request(req_idx, self._runner.req_states.index_to_req_id[req_idx], sampling_params)

    def apply_staged_writes(self) -> None:
        """Drop finished requests. vLLM calls this once a step, after it has added the new ones."""
        self._slots.remove_finished(_finished_ids())

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Edit `logits`, float32 [rows, vocab], in place."""
        self._slots.apply(logits, ctx)
        return logits


def _is_known(runner: Any) -> bool:
    """Return whether the model runner has all attributes that the plugin reads. Checked at start, not per request."""
    has_all = all(hasattr(runner, name) for name in ("add_requests", "is_last_pp_rank", "req_states"))
    return (
        has_all
        and hasattr(runner.req_states, "index_to_req_id")
        and _SCHEDULED in signature(runner.add_requests).parameters
    )


def check_supported(vllm_config: Any) -> None:
    """Check at start that each request will have one row, on a rank that sees all rows.

    Raises:
        ValueError: an option of vLLM prevents that; names it.
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


def _finished_ids() -> Collection[str]:
    """Return the ids of the requests that finished before this step.

    The model runner frees the slots of preempted requests in the same way. Only the scheduler's output tells the two
    apart.
    """
    finished: Collection[str] = find_caller_argument(_SCHEDULED).finished_req_ids
    return finished
