"""Fakes of the parts of vLLM that the plugin reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from logitship.sampler.processors.request_view import ModelView
from logitship.server.vllm.settings import VllmSettings
from tests.helpers.processors import CHECKS_HISTORY
from tests.server.runtime.fake_engine import EOS, VOCAB_SIZE

from .fake_vllm import fake_params

MakeParams = Callable[..., Any]


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


@pytest.fixture
def vllm_params() -> Callable[..., Any]:
    """Factory of fakes of vLLM's `SamplingParams`."""
    return fake_params
