from __future__ import annotations

import contextlib
import random

import pytest
import torch

from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.server.metrics.step_clock import StepClock, StepTime, TimedProcessors

from .conftest import Time

BASE = 0.04
PER_POSITION = 3e-6
POSITIONS = 450
"""Number of positions of a step with a short sequence."""


def seconds(clock: StepClock) -> dict[str, float]:
    return {phase.name: phase.seconds for phase in clock.phases if phase.seconds}


def test_sequential_phases(time: Time) -> None:
    clock = StepClock()
    with clock.schedule:
        time.now += 1
    time.now += 5  # between phases
    with clock.forward:
        time.now += 2
    assert seconds(clock) == {"schedule": 1, "forward": 2}


def test_time_counts_for_the_innermost_phase(time: Time) -> None:
    clock = StepClock()
    with clock.deliver:
        time.now += 1
        with clock.sample:
            time.now += 2
            with clock.processors:
                time.now += 4
            time.now += 8
        time.now += 16
    assert seconds(clock) == {"deliver": 17, "sample": 10, "processors": 4}


def test_repeated_phase(time: Time) -> None:
    clock = StepClock()
    for _ in range(3):
        with clock.sample:
            time.now += 1
    assert seconds(clock) == {"sample": 3}


def test_exception_ends_phases(time: Time) -> None:
    clock = StepClock()
    with contextlib.suppress(ValueError), clock.deliver, clock.sample:
        time.now += 1
        raise ValueError
    with clock.forward:
        time.now += 2
    assert seconds(clock) == {"sample": 1, "forward": 2}


def test_reset(time: Time) -> None:
    clock = StepClock()
    clock.num_rows = 3
    with clock.forward:
        time.now += 1
    clock.reset()
    assert (seconds(clock), clock.num_rows) == ({}, 0)


def test_phases_lists_every_phase() -> None:
    clock = StepClock()
    assert [getattr(clock, phase.name) for phase in clock.phases] == list(clock.phases)
    assert len(clock.phases) == 6


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


def test_time_of_a_step_is_learned() -> None:
    rng = random.Random(0)
    time = StepTime()
    for _ in range(300):
        number = rng.choice([200, 5000, 30_000])
        time.observe(number, (BASE + PER_POSITION * number) * rng.uniform(0.95, 1.05))
    assert time.base == pytest.approx(BASE, rel=0.1)
    assert time.per_position == pytest.approx(PER_POSITION, rel=0.1)


def test_same_steps_tell_nothing_of_positions() -> None:
    time = StepTime()
    for number in range(100):
        time.observe(1000 + number % 3, 0.04)
    assert (time.per_position, time.base) == (0.0, pytest.approx(0.04))


def test_cost_of_positions_is_kept() -> None:
    """A few short sequences run for an hour, whose steps take now longer, now shorter."""
    rng = random.Random(0)
    time = StepTime()
    time.observe(POSITIONS, BASE + PER_POSITION * POSITIONS)
    time.observe(20 * POSITIONS, BASE + 20 * PER_POSITION * POSITIONS)
    for _ in range(50):
        drift = rng.uniform(-0.002, 0.002)
        for number in range(100):
            time.observe(300 + 4 * number, BASE + PER_POSITION * 300 + drift)
    assert time.per_position == pytest.approx(PER_POSITION, rel=0.3)


def test_line_is_sound_if_steps_slow_down_for_other_reasons() -> None:
    time = StepTime()
    for number in range(100):
        time.observe(100 + number, 0.001 * number)
    assert time.base >= 0
    assert 0 <= time.per_position * 200 <= 0.2
