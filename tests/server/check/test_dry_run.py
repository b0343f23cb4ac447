from __future__ import annotations

from typing import Any

import pytest
import torch

from logitship import CustomLogitProcessor
from logitship.client.serialization.serialize import serialize
from logitship.sampler.processors.request_view import ModelView
from logitship.server.check.cases import CheckCase
from logitship.server.check.dry_run import DryRun
from logitship.server.check.local_timing import median_seconds
from logitship.server.check.replayed_calls import Recording

VOCAB_SIZE = 8


class Interrupted(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        raise KeyboardInterrupt


class ForgetsLongHistories(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> Any:
        return logits if len(custom_param_list[0]["__req__"].output_ids) < 9 else None


def dry_run_of(cls: type[CustomLogitProcessor]) -> DryRun:
    return DryRun(serialize(cls), ModelView(VOCAB_SIZE, frozenset({1}), None))


@pytest.fixture
def recordings() -> list[Recording]:
    recording = Recording(CheckCase("0", "random logits", {}, [2, 3], lambda: None))  # type: ignore[arg-type, return-value]
    recording.inputs = recording.outputs = [torch.zeros(VOCAB_SIZE)]
    recording.tokens = [4]
    return [recording]


def test_ctrl_c_ends_the_check(recordings: list[Recording]) -> None:
    with pytest.raises(KeyboardInterrupt):
        dry_run_of(Interrupted).facts(recordings)
    with pytest.raises(KeyboardInterrupt):
        median_seconds(dry_run_of(Interrupted), recordings, torch.zeros(1, VOCAB_SIZE))


@pytest.mark.parametrize("num_tokens", [0, 9])
def test_no_time_if_a_call_returns_no_logits(num_tokens: int, recordings: list[Recording]) -> None:
    dry_run = dry_run_of(ForgetsLongHistories)
    assert median_seconds(dry_run, recordings, torch.zeros(1, VOCAB_SIZE), num_tokens) is None
