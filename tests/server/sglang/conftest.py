"""Fakes of the parts of SGLang that the plugin reads."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from logitship.sampler.processors.request_view import ModelView
from logitship.server.runtime.plugin_processors import PluginProcessors, for_execution
from logitship.server.runtime.seat import EngineWorker
from logitship.server.sglang.generate_fields import ADMITTED
from logitship.server.sglang.sampling_ranks import SamplingRanks
from logitship.server.sglang.sglang_seat import SglangSeat
from logitship.server.sglang.sglang_settings import SglangSettings
from logitship_sglang import logger
from tests.helpers.processors import CHECKS_HISTORY

from ..vllm.early_executor import EarlyExecutor  # noqa: TID252
from .fake_scheduler import EOS, MAX_ROWS, VOCAB_SIZE, FakeReq

SHIPPED_EXECUTOR = "logitship.server.runtime.plugin_processors.shipped_executor"

MakeReq = Callable[..., FakeReq]
NewSteps = Callable[..., tuple[PluginProcessors, SglangSeat]]


class FinishAbort(SimpleNamespace):
    """Fake of SGLang's `FINISH_ABORT`."""

    def __init__(self, message: str, status_code: int, err_type: str) -> None:
        super().__init__(message=message, status_code=status_code, err_type=err_type)


@pytest.fixture(autouse=True)
def schedule_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the plugin import `FINISH_ABORT` from SGLang."""
    module = ModuleType("sglang.srt.managers.schedule_batch")
    module.FINISH_ABORT = FinishAbort  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, module.__name__, module)


@pytest.fixture
def model() -> ModelView:
    return ModelView(VOCAB_SIZE, frozenset({EOS}), None)


@pytest.fixture
def settings() -> SglangSettings:
    """Settings that run shipped code in this process, because sandboxes take seconds to start."""
    return SglangSettings(processor_isolation="none")


@pytest.fixture
def early_executor(monkeypatch: pytest.MonkeyPatch) -> EarlyExecutor:
    """The executor of all shipped processors: half of their calls begin before their logits exist."""
    executor = EarlyExecutor()
    executor.share = 0.5
    monkeypatch.setattr(SHIPPED_EXECUTOR, lambda *args: executor)
    return executor


@pytest.fixture
def processors(settings: SglangSettings, model: ModelView) -> PluginProcessors:
    return for_execution(settings, model, MAX_ROWS, logging.getLogger("sglang.logitship"))


@pytest.fixture
def steps(settings: SglangSettings, model: ModelView, processors: PluginProcessors) -> SglangSeat:
    return SglangSeat(EngineWorker(settings, model, one_rank(), processors, logger))


@pytest.fixture
def new_steps(settings: SglangSettings, model: ModelView) -> NewSteps:
    """Factory of processors and the steps that run them, with an executor of their own, for tests of several examples.

    Without `executor`, they have the one that the settings ask for.
    """

    def new(executor: EarlyExecutor | None = None) -> tuple[PluginProcessors, SglangSeat]:
        with pytest.MonkeyPatch.context() as patch:
            if executor is not None:
                patch.setattr(SHIPPED_EXECUTOR, lambda *args: executor)
            processors = for_execution(settings, model, MAX_ROWS, logging.getLogger("sglang.logitship"))
        return processors, SglangSeat(EngineWorker(settings, model, one_rank(), processors, logger))

    return new


def one_rank() -> SamplingRanks:
    return SamplingRanks(SimpleNamespace(rank_in_group=0, world_size=1))


def make_fake_req(
    rid: str = "r", *, prompt: int = 3, tokens: int = 8, first: int | None = 2, own: int = 0, **params: Any
) -> FakeReq:
    """Return a request with `ChecksHistory`, or with no processor if `first` is None.

    One that fails gets its own class, because without a sandbox a fault fails the whole call. Others have one of their
    own for each value of `own`.
    """
    source = CHECKS_HISTORY.source + (f"# {rid}" if params.get("fails_at") is not None else "#" * own)
    string = ADMITTED + json.dumps({"source": source, "class_name": "ChecksHistory"})
    custom_params = None if first is None else {"first": first, "prompt": prompt, "__req__": object(), **params}
    sampling = SimpleNamespace(
        temperature=1.0,
        top_p=1.0,
        top_k=1 << 30,
        min_p=0.0,
        repetition_penalty=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        sampling_seed=None,
        max_new_tokens=tokens,
        min_new_tokens=0,
        stop_strs=[],
        stop_regex_strs=[],
        stop_token_ids=None,
        ignore_eos=False,
        no_stop_trim=False,
        logit_bias=None,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        custom_params=custom_params,
    )
    return FakeReq(rid, array("q", [7] * prompt), sampling, None if first is None else string)


@pytest.fixture
def make_req() -> MakeReq:
    """Factory of requests, see `make_fake_req`."""
    return make_fake_req
