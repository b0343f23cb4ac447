"""Fakes of the parts of vLLM that the plugin reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from logitship.sampler.processors.request_view import ModelView
from logitship.server.runtime.plugin_processors import PluginProcessors, for_execution
from logitship.server.runtime.seat import EngineWorker
from logitship.server.vllm.batch_requests import BatchRequests
from logitship.server.vllm.batch_seat import BatchSeat
from logitship.server.vllm.settings import VllmSettings, logger
from tests.helpers.processors import CHECKS_HISTORY

from .early_executor import EarlyExecutor
from .fake_runner import EOS, FAULT_TOKEN, MAX_ROWS, VOCAB_SIZE, OneRank, Record, Runner

MakeParams = Callable[..., Any]
NewProcessors = Callable[[EarlyExecutor], PluginProcessors]
MakeBatch = Callable[..., BatchSeat]


SHIPPED_EXECUTOR = "logitship.server.runtime.plugin_processors.shipped_executor"


@pytest.fixture
def early_executor(monkeypatch: pytest.MonkeyPatch) -> EarlyExecutor:
    """The executor of all shipped processors."""
    executor = EarlyExecutor()
    monkeypatch.setattr(SHIPPED_EXECUTOR, lambda *args: executor)
    return executor


@pytest.fixture
def processor_string() -> str:
    """`ChecksHistory` in source form, with parameters `first`, `prompt` (its length) and `fails_at`."""
    return json.dumps({"source": CHECKS_HISTORY.source, "class_name": "ChecksHistory"})


@pytest.fixture
def model() -> ModelView:
    return ModelView(VOCAB_SIZE, frozenset({EOS}), None)


@pytest.fixture
def settings() -> VllmSettings:
    """Settings that run shipped code in this process, because sandboxes take seconds to start."""
    return VllmSettings(enable_custom_logit_processor=True, processor_isolation="none")


def fake_params(extra_args: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Return a fake of vLLM's `SamplingParams`."""
    defaults: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "seed": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop": [],
        "stop_token_ids": [],
        "ignore_eos": False,
        "include_stop_str_in_output": False,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": None,
        "bad_words_token_ids": None,
        "structured_outputs": None,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
    }
    return SimpleNamespace(**defaults | fields, extra_args=extra_args)


@pytest.fixture
def vllm_params() -> Callable[..., Any]:
    """Factory of fakes of vLLM's `SamplingParams`."""
    return fake_params


@pytest.fixture
def processors(settings: VllmSettings, model: ModelView) -> PluginProcessors:
    return for_execution(settings, model, MAX_ROWS, logger)


@pytest.fixture
def new_processors(settings: VllmSettings, model: ModelView) -> NewProcessors:
    """Factory of processors that an executor of their own runs, for tests of several examples."""

    def new(executor: EarlyExecutor) -> PluginProcessors:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SHIPPED_EXECUTOR, lambda *args: executor)
            return for_execution(settings, model, MAX_ROWS, logger)

    return new


@pytest.fixture
def make_batch(settings: VllmSettings, model: ModelView, processors: PluginProcessors) -> MakeBatch:
    """Factory of the plugin on a runner, with `processors` or with other ones."""

    def make(runner: Runner, processors: PluginProcessors = processors) -> BatchSeat:
        return BatchSeat(EngineWorker(settings, model, OneRank(), processors, logger), BatchRequests(runner))

    return make


@pytest.fixture
def request_of(processor_string: str, vllm_params: MakeParams) -> Callable[..., Record]:
    """Factory of requests with `ChecksHistory`.

    One that fails gets its own class, because without a sandbox a fault fails the whole call.
    """

    def make(req_id: str, prompt: int = 3, tokens: int = 8, **params: Any) -> Record:
        custom_params = {"first": 2, "prompt": prompt, **params}
        string = json.loads(processor_string)
        if params.get("fails_at") is not None:
            string["source"] += f"# {req_id}"
        extra_args = {"custom_logit_processor": json.dumps(string), "custom_params": custom_params}
        sampling = vllm_params(extra_args, max_tokens=tokens, stop_token_ids=[FAULT_TOKEN])
        return Record(req_id, sampling, [7] * prompt)

    return make
