from __future__ import annotations

import json
from typing import Any

import pytest

from logitship.builtin_processors.disallowed_tokens import DisallowedTokensLogitsProcessor
from logitship.builtin_processors.params import PreparationUnavailable
from logitship.sampler.processors.request_view import ModelView
from logitship.server.vllm.settings import VllmSettings
from logitship.server.vllm.vllm_processors import for_admission, for_execution
from tests.server.vllm.conftest import MakeParams

SOURCE = """
from logitship import CustomLogitProcessor
class Hangs(CustomLogitProcessor):
    def __init__(self):
        while {condition}: pass
    def __call__(self, logits, custom_param_list=None):
        return logits
"""


def shipped(condition: bool) -> dict[str, Any]:
    source = SOURCE.format(condition=condition)
    return {"custom_logit_processor": json.dumps({"source": source, "class_name": "Hangs"})}


@pytest.mark.slow
def test_admission_keeps_no_sandbox(model: ModelView, vllm_params: MakeParams) -> None:
    """The verdict is remembered: the second time, nothing is loaded."""
    settings = VllmSettings(enable_custom_logit_processor=True, sandbox_load_timeout=60.0)
    processors = for_admission(settings, model)
    loaded = [processors.load(vllm_params(shipped(False)), "admission") for _ in range(2)]
    (first,), (second,) = (params.processors for params in loaded)
    assert first.processor is second.processor
    assert first.processor.instance.sandbox.check() is False
    for params in loaded:
        processors.release(params)
    assert processors.in_use == 0


@pytest.mark.slow
def test_slow_load_is_refused_and_remembered(model: ModelView, vllm_params: MakeParams) -> None:
    settings = VllmSettings(enable_custom_logit_processor=True, sandbox_load_timeout=0.3)
    processors = for_admission(settings, model)
    with pytest.raises(ValueError, match=r"gave no answer within (0\.3|1\.5) s"):
        processors.load(vllm_params(shipped(True)), "admission")
    with pytest.raises(ValueError, match=r"gave no answer within (0\.3|1\.5) s.* the next one is possible in 600 s"):
        processors.load(vllm_params(shipped(True)), "admission")
    assert processors.in_use == 0


def test_refused_request_releases_its_processors(
    settings: VllmSettings, model: ModelView, vllm_params: MakeParams, processor_string: str
) -> None:
    """The first of its processors was loaded."""
    processors = for_execution(settings, model, max_rows=2)
    several = [{"processor": processor_string}, {"processor": {"name": "nothing"}}]
    with pytest.raises(ValueError, match=r"logits_processors\[1\]: no processor"):
        processors.load(vllm_params({"logits_processors": several}), "x")
    with pytest.raises(ValueError, match="repetition_penalty"):
        processors.load(vllm_params({"logits_processors": several[:1]}, repetition_penalty=1000.0), "x")
    assert processors.in_use == 0


def test_all_sandboxes_in_use(model: ModelView, vllm_params: MakeParams, processor_string: str) -> None:
    settings = VllmSettings(enable_custom_logit_processor=True, processor_isolation="none", max_sandboxes=1)
    processors = for_execution(settings, model, max_rows=2)
    held = processors.load(vllm_params({"custom_logit_processor": processor_string}), "x")
    with pytest.raises(ValueError, match="try again later"):
        processors.load(vllm_params(shipped(False)), "y")
    processors.release(held)
    processors.load(vllm_params(shipped(False)), "y")


def test_unavailable_preparation_is_refused(
    settings: VllmSettings, model: ModelView, vllm_params: MakeParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: object) -> None:
        raise PreparationUnavailable("try again later")

    monkeypatch.setattr(DisallowedTokensLogitsProcessor, "prepare", busy)
    processors = for_execution(settings, model, max_rows=2)
    wanted = {"logits_processors": [{"processor": {"name": "disallowed_tokens"}, "params": {"token_ids": [3]}}]}
    with pytest.raises(ValueError, match="try again later"):
        processors.load(vllm_params(wanted), "x")
    assert processors.in_use == 0
