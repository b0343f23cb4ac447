from __future__ import annotations

import pytest
import torch

from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.server.metrics.step_clock import StepClock, TimedProcessors


@pytest.fixture
def clock() -> StepClock:
    return StepClock()


@pytest.fixture
def processors(clock: StepClock) -> TimedProcessors:
    model = ModelView(8, frozenset({1}), None)
    return TimedProcessors(None, torch.device("cpu"), False, model=model, clock=clock)


def test_both_apply_methods_are_timed(
    processors: TimedProcessors, clock: StepClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[str] = []

    def apply(self: ShippedProcessors, logits: torch.Tensor, num_draft_tokens: object = None) -> torch.Tensor:
        running.extend(phase.name for phase in clock._running)
        return logits

    monkeypatch.setattr(ShippedProcessors, "apply", apply)
    monkeypatch.setattr(ShippedProcessors, "apply_with_spec_decode", apply)
    logits = torch.zeros(1, 8)
    assert processors.apply(logits) is logits
    assert processors.apply_with_spec_decode(logits, [1]) is logits
    assert running == ["processors", "processors"]
    assert clock.processors.seconds > 0
