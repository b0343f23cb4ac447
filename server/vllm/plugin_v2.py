"""The plugin for vLLM's model runner V2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import torch
from packaging.version import Version
from vllm.v1.worker.gpu.sample.logits_processor import (  # pyright: ignore[reportMissingImports]
    LogitsContext,
    LogitsProcessor,
    LogitsProcRequestState,
)

from logitship.server.runtime.seat import start_engine_worker

from .callers import SCHEDULED, find_caller, find_caller_argument
from .configuration import begins_early, model_view
from .endings import missing_carrier, send_endings
from .extra_args import has_processors
from .params_validation import admit
from .sampling_recorder import SlotRecorder
from .settings import VllmSettings, logger
from .slot_seat import SlotSeat
from .tensor_parallel import TensorParallelRanks
from .worker_loads import answer_front_ends

_UNKNOWN = "logitship does not know the model runner of this vLLM: it knows those of 0.32 and 0.33"
_SPECULATES_SINCE = Version("0.33")
"""The first vLLM that calls custom processors for the rows of draft tokens. Earlier ones skip them."""


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
        if not _is_known(self._runner) or missing_carrier():
            raise ValueError(_UNKNOWN)
        self._row_order = _row_order()
        settings = VllmSettings.from_environment()
        ranks, max_rows = TensorParallelRanks(), req_states.max_num_reqs
        worker = start_engine_worker(
            settings, model_view(vllm_config), ranks, max_rows, logger, loads_in_background=True
        )
        has_drafts = vllm_config.speculative_config is not None
        max_length = vllm_config.model_config.max_model_len
        self._seat = SlotSeat(worker, req_states, has_drafts=has_drafts, max_length=max_length)
        answer_front_ends(self._seat.must_wait)
        self._recorder = SlotRecorder(self._runner)
        send_endings(self._runner, self._seat.take_endings, self._seat.fault_token, self._recorder.take)
        # Which draft tokens were accepted is known on the device alone.
        self._begins_early = begins_early(vllm_config) and not has_drafts

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Add a request that was given a slot. Return False if vLLM need not call `apply` for it."""
        is_recorded = self._recorder.add_request(req_idx, sampling_params)
        req_id = self._runner.req_states.index_to_req_id[req_idx]
        holds_embeddings = has_processors(sampling_params) and _holds_embeddings(req_id)
        has_seat = self._seat.add_request(req_idx, req_id, sampling_params, holds_embeddings=holds_embeddings)
        return has_seat or is_recorded

    def apply_staged_writes(self) -> None:
        """Drop finished requests, and begin calls. vLLM calls this once a step, after it has added the new requests."""
        output = find_caller_argument(SCHEDULED)
        # The model runner frees the slots of preempted requests in the same way. Only this tells the two apart.
        self._seat.remove_finished(output.finished_req_ids)
        if self._begins_early:
            self._seat.begin(self._planned_rows(output))

    def _planned_rows(self, output: Any) -> Iterator[tuple[int, int]]:
        """Yield slot and length of each row, as the model runner will arrange them."""
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
        counts = output.num_scheduled_tokens
        slots = self._runner.req_states.req_id_to_index
        for req_id in self._row_order(counts, output.scheduled_spec_decode_tokens, self._runner.decode_query_len):
            yield slots[req_id], computed[req_id] + counts[req_id]

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Edit `logits`, float32 [rows, vocab], in place."""
        self._recorder.record_stage(logits)
        self._seat.apply(logits, ctx)
        self._recorder.record_stage(logits)
        return logits


def _holds_embeddings(req_id: str) -> bool:
    """Return whether the prompt of a request that is added in this step contains embeddings."""
    added = find_caller_argument(SCHEDULED).scheduled_new_reqs
    return any(each.req_id == req_id and each.prompt_embeds is not None for each in added)


def _row_order() -> Callable[..., list[str]]:
    """Return vLLM's function that sorts the requests of a step.

    Imported here, because the front end imports this module as well and runs no model.

    Raises:
        ValueError: this vLLM has none.
    """
    try:
        from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(_UNKNOWN) from None
    order: Callable[..., list[str]] = sort_batch_req_ids
    return order


def _is_known(runner: Any) -> bool:
    """Return whether the model runner has all attributes that the plugin reads. Checked at start, not per request."""
    names = ("add_requests", "decode_query_len", "req_states", "sample_tokens")
    return (
        all(hasattr(runner, name) for name in names)
        and all(hasattr(runner.req_states, name) for name in ("index_to_req_id", "req_id_to_index"))
        and SCHEDULED in signature(runner.add_requests).parameters
    )


def check_supported(vllm_config: Any) -> None:
    """Check at start that the rows of each request follow its sequence, on a rank that sees all rows.

    Raises:
        ValueError: an option of vLLM prevents that; names it.
    """
    parallel, speculation = vllm_config.parallel_config, vllm_config.speculative_config
    refused = {
        "speculative decoding (--speculative-config) before vLLM 0.33": speculation is not None
        and not _drafts_reach_processors(),
        'synthetic verification (rejection_sample_method "synthetic")': getattr(
            speculation, "rejection_sample_method", None
        )
        == "synthetic",
        "diffusion models": vllm_config.model_config.is_diffusion,
        "prefill context parallelism (--prefill-context-parallel-size)": parallel.prefill_context_parallel_size > 1,
        "batch-sharded sampling (--enable-batch-sharded-sampling)": parallel.enable_batch_sharded_sampling,
    }
    for option, is_on in refused.items():
        if is_on:
            raise ValueError(
                f"logitship cannot run with {option}: it needs all requests on one rank, and a row for each token that "
                "vLLM samples"
            )


def _drafts_reach_processors() -> bool:
    """Return whether vLLM calls custom processors for the rows of draft tokens."""
    from vllm import __version__  # pyright: ignore[reportMissingImports]

    return Version(__version__) >= _SPECULATES_SINCE
