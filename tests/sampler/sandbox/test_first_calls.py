from __future__ import annotations

import pytest

from logitship.sampler.sandbox.first_calls import PERIOD, FirstCallCredit


def test_extra_time_is_used_once_in_a_period() -> None:
    now = 1000.0
    credit = FirstCallCredit(1.0, 10.0, clock=lambda: now)
    assert credit.left("a") == 9.0
    credit.use("a", 0.5)  # no longer than any other call
    credit.use("a", 1.0)
    assert credit.left("a") == 9.0
    credit.use("a", 3.0)
    assert credit.left("a") == 7.0
    credit.use("a", 10.0)
    assert credit.left("a") == 0.0
    assert credit.left("b") == 9.0, "another tenant has its own"
    now += PERIOD / 3
    assert credit.left("a") == pytest.approx(1.0)
    now += 10 * PERIOD
    assert credit.left("a") == 9.0


def test_first_step_timeout_below_the_step_timeout() -> None:
    assert FirstCallCredit(2.0, 1.0).left("a") == 0.0
