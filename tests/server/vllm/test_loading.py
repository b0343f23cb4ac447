from __future__ import annotations

import json
from typing import Any

import pytest

from logitship.builtin_processors.disallowed_tokens import DisallowedTokensLogitsProcessor
from logitship.builtin_processors.params import PreparationUnavailable
from logitship.sampler.processors.request_view import ModelView
from logitship.server.requests.messages import ProcessorRequest
from logitship.server.runtime.plugin_setup import for_admission, for_execution
from logitship.server.vllm.extra_args import read_processors
from logitship.server.vllm.settings import VllmSettings, logger

SOURCE = """
from logitship import CustomLogitProcessor
class Hangs(CustomLogitProcessor):
    def __init__(self):
        while {condition}: pass
    def __call__(self, logits, custom_param_list=None):
        return logits
"""


def shipped(condition: bool) -> tuple[ProcessorRequest, ...]:
    source = SOURCE.format(condition=condition)
    return requested({"custom_logit_processor": json.dumps({"source": source, "class_name": "Hangs"})})


def requested(extra_args: dict[str, Any]) -> tuple[ProcessorRequest, ...]:
    return read_processors(extra_args, 1 << 20)


@pytest.mark.slow
def test_admission_keeps_no_sandbox(model: ModelView) -> None:
    """The verdict is remembered: the second time, nothing is loaded."""
    settings = VllmSettings(enable_custom_logit_processor=True, sandbox_load_timeout=60.0)
    processors = for_admission(settings, model, logger)
    loaded = [processors.load(shipped(False), "admission") for _ in range(2)]
    (first,), (second,) = loaded
    assert first.processor is second.processor
    assert first.processor.instance.sandbox.check() is False
    for uses in loaded:
        processors.release(uses)
    assert processors.in_use == 0
    processors.close()


@pytest.mark.slow
async def test_slow_load_is_refused_and_remembered(model: ModelView) -> None:
    settings = VllmSettings(enable_custom_logit_processor=True, sandbox_load_timeout=0.3)
    processors = for_admission(settings, model, logger)
    with pytest.raises(ValueError, match=r"gave no answer within (0\.3|1\.5) s"):
        await processors.check(shipped(True))
    with pytest.raises(ValueError, match=r"gave no answer within (0\.3|1\.5) s.* the next one is possible in \d+ s"):
        await processors.check(shipped(True))
    assert processors.in_use == 0
    processors.close()


def test_refused_request_releases_its_processors(
    settings: VllmSettings, model: ModelView, processor_string: str
) -> None:
    """The first of its processors was loaded."""
    processors = for_execution(settings, model, 2, logger)
    several = [{"processor": processor_string}, {"processor": {"name": "nothing"}}]
    with pytest.raises(ValueError, match=r"logits_processors\[1\]: no processor"):
        processors.load(requested({"logits_processors": several}), "x")
    assert processors.in_use == 0


def test_all_sandboxes_in_use(model: ModelView, processor_string: str) -> None:
    settings = VllmSettings(enable_custom_logit_processor=True, processor_isolation="none", max_sandboxes=1)
    processors = for_execution(settings, model, 2, logger)
    held = processors.load(requested({"custom_logit_processor": processor_string}), "x")
    with pytest.raises(ValueError, match="try again later"):
        processors.load(shipped(False), "y")
    processors.release(held)
    processors.load(shipped(False), "y")


def test_unavailable_preparation_is_refused(
    settings: VllmSettings, model: ModelView, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: object) -> None:
        raise PreparationUnavailable("try again later")

    monkeypatch.setattr(DisallowedTokensLogitsProcessor, "prepare", busy)
    processors = for_execution(settings, model, 2, logger)
    wanted = {"logits_processors": [{"processor": {"name": "disallowed_tokens"}, "params": {"token_ids": [3]}}]}
    with pytest.raises(ValueError, match="try again later"):
        processors.load(requested(wanted), "x")
    assert processors.in_use == 0
