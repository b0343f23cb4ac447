"""Lets requests of vLLM's model runner V1 sit steps out, because a call of their processors is late.

The model runner discards the token that the step samples for such a row, as it does for partly computed prompts. The
scheduler is told that the row's last token is not computed, and not to plan the request before it resumes. Then the
token is computed again, and the row is added to the batch again.

Assumptions:
* The scheduler runs in this process and thread. It plans the next step when this one has been sampled, also if it
  schedules asynchronously, and leaves out requests whose `next_decode_eligible_step` has not come.
* A request that is left out of a step loses its row, and gets a row and its generator of random numbers with the next.
* Keys and values of a token that is computed again are the same, and overwrite those of the first time.
"""

from __future__ import annotations

import sys
import weakref
from functools import cached_property
from typing import Any

from .callers import find_caller
from .settings import logger

_SCHEDULERS = ("vllm.v1.core.sched.scheduler.Scheduler", "vllm.v1.core.sched.async_scheduler.AsyncScheduler")
_SPECS = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
"""Caches in which a token can be computed again. The state of a Mamba layer has it already, for example."""
_NEVER = sys.maxsize


class RowDeferral:
    """Discards the tokens of rows, and keeps their requests out of the next steps.

    Args:
        runner: vLLM's `GPUModelRunner`.
        engine_core: vLLM's `EngineCore`, whose scheduler does not exist yet; None: it runs in another process.
    """

    def __init__(self, runner: Any, engine_core: Any | None) -> None:
        self._runner = weakref.ref(runner)  # it holds the plugin
        self._engine_core = None if engine_core is None else weakref.ref(engine_core)

    def defer(self, row: int) -> bool:
        """Discard the token that this step samples for a row. Called in `apply`.

        Returns:
            True if that was possible. The request is left out of steps until `resume`.
        """
        if self._obstacle is not None:
            return False
        runner = self._live
        batch = runner.input_batch
        request_id = batch.req_ids[row]
        if request_id in runner.num_prompt_logprobs:
            return False  # vLLM returns those of a prompt with the first token, and only then
        runner.discard_request_mask.np[row] = True
        batch.generators.pop(row, None)  # so that it is not used for the discarded token
        request = self._scheduler.requests.get(request_id)
        if request is not None:  # it has not been aborted
            request.num_computed_tokens -= 1
            if request.num_output_placeholders:  # asynchronous scheduling: one stands for the discarded token
                request.num_output_placeholders -= 1
            request.next_decode_eligible_step = _NEVER
        return True

    def resume(self, request_id: str) -> None:
        """Let a request take part in the next steps. Called in `update_state`, when the step is planned already."""
        request = self._scheduler.requests.get(request_id)
        if request is not None:
            request.next_decode_eligible_step = 0

    @property
    def _scheduler(self) -> Any:
        engine_core = None if self._engine_core is None else self._engine_core()
        assert engine_core is not None
        return engine_core.scheduler

    @property
    def _live(self) -> Any:
        runner = self._runner()
        assert runner is not None
        return runner

    @cached_property
    def _obstacle(self) -> str | None:
        """Reason why no request of this engine can sit out; None: they can."""
        obstacle: str | None = "vLLM's scheduler is not in the process of the model runner"
        if self._engine_core is not None:
            try:
                _ = self._live.num_prompt_logprobs, self._live.input_batch.generators
                obstacle = _obstacle_of(self._scheduler)
            except AttributeError as error:
                obstacle = f"logitship does not know this vLLM: {error}"
        if obstacle is not None:
            logger.warning("requests whose calls are late end, because they cannot sit steps out: %s", obstacle)
        return obstacle


def find_engine_core(vllm_config: Any) -> Any | None:
    """Return the `EngineCore` that makes the plugin, in the only process of an engine; None if it has several.

    A worker process that was forked has only a copy of the engine core on its stack.
    """
    backend = vllm_config.parallel_config.distributed_executor_backend
    return find_caller("EngineCore") if backend == "uni" else None


def _obstacle_of(scheduler: Any) -> str | None:
    name = f"{type(scheduler).__module__}.{type(scheduler).__qualname__}"
    if name not in _SCHEDULERS:
        return f"logitship does not know the scheduler {name}"
    specs = {type(group.kv_cache_spec).__name__ for group in scheduler.kv_cache_config.kv_cache_groups}
    if not specs <= {*_SPECS}:
        return f"a token cannot be computed again in a cache of {', '.join(sorted(specs - {*_SPECS}))}"
    others = ("connector", "ec_connector", "aux_output_connector", "lora_config")
    used = [name for name in others if getattr(scheduler, name)]
    return f"vLLM's scheduler has a {used[0]}" if used else None
