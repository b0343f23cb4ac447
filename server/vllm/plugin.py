"""The plugin for vLLM's model runner V1."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor  # pyright: ignore[reportMissingImports]

from logitship.server.runtime.seat import start_engine_worker

from .batch_requests import BatchRequests, missing_attributes
from .batch_seat import BatchSeat
from .callers import find_caller
from .configuration import begins_early, model_view
from .endings import missing_carrier, send_endings
from .params_validation import admit
from .row_deferral import RowDeferral, find_engine_core
from .sampling_recorder import BatchRecorder, missing_methods
from .settings import VllmSettings, logger
from .tensor_parallel import TensorParallelRanks
from .worker_loads import answer_front_ends


class LogitshipLogitsProcessor(LogitsProcessor):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Runs the processors of requests, each on the rows of its own requests."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Check a request in the front end, before vLLM admits it.

        Raises:
            ValueError: the request is refused with status 400 and this message.
        """
        admit(sampling_params)

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """Start the executor of the processors.

        Raises:
            ValueError: a setting is wrong, or vLLM is configured so that processors would not see the output.
        """
        settings = VllmSettings.from_environment()
        runner = _model_runner(vllm_config)
        max_rows = vllm_config.scheduler_config.max_num_seqs
        worker = start_engine_worker(
            settings, model_view(vllm_config), TensorParallelRanks(), max_rows, logger, loads_in_background=True
        )
        scheduling = "asynchronous" if vllm_config.scheduler_config.async_scheduling else "synchronous"
        logger.info("logitship runs in model runner V1, with %s scheduling", scheduling)
        deferral = RowDeferral(runner, find_engine_core(vllm_config))
        max_length = vllm_config.model_config.max_model_len
        self._seat = BatchSeat(worker, BatchRequests(runner), deferral, max_length)
        answer_front_ends(self._seat.must_wait)
        self._recorder = BatchRecorder(runner)
        send_endings(runner, self._seat.take_endings, self._seat.fault_token, self._recorder.take)
        self._begins_early = begins_early(vllm_config)

    def is_argmax_invariant(self) -> bool:
        """Return False: a shipped processor may change its rows in any way."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply the changes of the batch, and begin calls that need nothing else. vLLM computes the logits next."""
        self._seat.update_state(batch_update)
        self._recorder.update_state(batch_update)
        if self._begins_early:
            self._seat.begin()

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Edit `logits`, float32 [rows, vocab], in place."""
        self._recorder.record_stage(logits)
        self._seat.apply(logits)
        self._recorder.record_stage(logits)
        return logits


def _model_runner(vllm_config: Any) -> Any:
    """Return the model runner that makes the plugin.

    Raises:
        ValueError: logitship does not know it, or it will not fill in the tokens that processors must see.
    """
    if vllm_config.scheduler_config.async_scheduling and not vllm_config.model_config.logits_processors:
        raise ValueError(
            "logitship must be named with --logits-processors: with asynchronous scheduling, vLLM does not show the "
            "sampled tokens to plugins that it found through an entry point"
        )
    # Imported here, because the front end imports this module as well and runs no model.
    from vllm.v1.worker.gpu_input_batch import (  # pyright: ignore[reportMissingImports]
        CachedRequestState,
        InputBatch,
    )

    runner = find_caller("GPUModelRunner")
    unknown = ["GPUModelRunner"]
    if runner is not None:
        unknown = missing_attributes(type(runner), InputBatch, CachedRequestState) + missing_carrier()
        unknown += missing_methods(runner)
    if unknown:
        raise ValueError(
            f"logitship does not know the model runner of this vLLM: it knows that of 0.32, with {', '.join(unknown)}"
        )
    return runner
