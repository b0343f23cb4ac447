from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from logitship.server.engine.tenant_shares import (
    MIN_FORCED,
    MIN_WAIT,
    PROCESSOR_WAIT,
    PROMPT_BLOCK,
    SHARED_FOR,
    WINDOW,
    TenantShares,
)
from tests.helpers.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shares(clock: Clock) -> TenantShares:
    return TenantShares(0.5, cores=2, clock=clock)


def test_a_processor_of_all_sequences_is_waited_for(shares: TenantShares) -> None:
    shares.begin_step(["a", "a", "a"])
    assert shares.left("a", 3) == math.inf
    assert shares.left("a", 2) == pytest.approx(MIN_WAIT)


def test_wait_may_be_endless(clock: Clock) -> None:
    shares = TenantShares(0.5, clock=clock, processor_wait=math.inf)
    shares.begin_step(["a", "b"])
    assert shares.left("a") == math.inf


def test_one_tenant_is_waited_for_without_end(shares: TenantShares) -> None:
    shares.begin_step({"a"})
    shares.charge("a", 1000.0)
    assert (shares.left("a"), shares.share("a"), shares.retry_after("a")) == (math.inf, 0.0, None)
    assert shares.seconds == {"a": 1000.0}


def test_all_calls_of_a_step_have_one_deadline(shares: TenantShares, clock: Clock) -> None:
    shares.observe_step(0.2)
    shares.begin_step({"a", "b"})
    assert shares.left("a") == pytest.approx(PROCESSOR_WAIT * 0.2)
    clock.now += 0.03
    assert shares.left("b") == pytest.approx(PROCESSOR_WAIT * 0.2 - 0.03)
    clock.now += 1
    assert shares.left("a") == 0.0
    shares.begin_step({"a", "b"})
    assert shares.left("a") == pytest.approx(PROCESSOR_WAIT * 0.2)


@dataclass(eq=False)
class Running:
    """A sequence, as far as its prompt counts."""

    num_prompt: int
    num_computed: int

    @property
    def prefilling(self) -> bool:
        return self.num_computed < self.num_prompt - 1


def test_time_of_prompts(shares: TenantShares) -> None:
    shares.observe_step(0.1)
    shares.observe_step(0.1 + 0.032, num_prompt_tokens=32)
    shares.begin_step(["a", "b"])
    running: list[Any] = [Running(8, 9), Running(10, 2), Running(4, 0)]
    assert shares.prompt_seconds(running) == pytest.approx(12 * 0.001)
    running.append(Running(1000, 0))  # as much as a step computes
    assert shares.prompt_seconds(running) == pytest.approx(shares.num_prompt_tokens(1000, 450) * 0.001)


def test_short_steps_wait_at_least_some_time(shares: TenantShares) -> None:
    shares.observe_step(1e-4)
    shares.begin_step({"a", "b"})
    assert shares.left("a") == pytest.approx(MIN_WAIT)


def test_no_step_waits_for_a_tenant_over_its_share(shares: TenantShares, clock: Clock) -> None:
    shares.begin_step({"a", "b"})
    shares.charge("a", 0.49 * WINDOW * 2)
    assert shares.left("a") > 0
    shares.charge("a", 0.51 * WINDOW * 2)
    assert shares.share("a") == pytest.approx(1.0)
    assert shares.left("a") == 0.0
    assert shares.left("b") > 0
    assert shares.retry_after("b") is None
    seconds = shares.retry_after("a")
    assert seconds == math.ceil(WINDOW * math.log(2))
    clock.now += seconds
    assert not shares.is_over("a")
    assert shares.retry_after("a") is None


def test_who_is_alone_again_may_use_everything(shares: TenantShares) -> None:
    shares.begin_step({"a", "b"})
    shares.charge("a", WINDOW * 4)
    shares.begin_step({"a"})
    assert shares.left("a") == math.inf
    assert shares.retry_after("a") is None
    shares.begin_step({"b"})
    assert shares.retry_after("a") is not None


def test_usual_step_follows_the_steps(shares: TenantShares) -> None:
    for seconds in [1.0] * 3 + [0.1] * 60:
        shares.observe_step(seconds)
    shares.begin_step({"a", "b"})
    assert shares.left("a") == pytest.approx(PROCESSOR_WAIT * 0.1, rel=0.01)


def test_metrics_have_a_bounded_number_of_tenants(shares: TenantShares) -> None:
    for number in range(5):
        shares.charge(f"t{number}", 1.0 + number)
    assert shares.totals(5) == {f"t{number}": 1.0 + number for number in range(5)}
    assert shares.totals(2) == {"t0": 1.0, "t1": 2.0, "other": 12.0}


def test_prompt_tokens_are_limited_by_their_time(shares: TenantShares, clock: Clock) -> None:
    shares.begin_step({"a", "b"})
    assert shares.num_prompt_tokens(256, 1) == 256  # nothing is known yet
    shares.observe_step(0.1)
    shares.observe_step(0.1 + 0.2, 200)  # 1 ms each
    assert shares.num_prompt_tokens(256, 1) == 48
    assert shares.num_prompt_tokens(20, 1) == 20
    assert shares.num_prompt_tokens(256, 0) == 144, "as long as a usual step and its prompts"
    clock.now += SHARED_FOR / 2
    shares.begin_step({"a"})
    assert shares.num_prompt_tokens(256, 1) == 48, "the next request of b would wait for them"
    clock.now += SHARED_FOR
    shares.begin_step({"a"})
    assert shares.num_prompt_tokens(256, 1) == 144, "one and a half times as long as what decodes"
    assert shares.num_prompt_tokens(256, 0) == 256, "nothing waits for them"


def test_some_prompt_tokens_are_always_computed(shares: TenantShares) -> None:
    shares.begin_step({"a", "b"})
    shares.observe_step(0.001)
    shares.observe_step(1.0, 10)
    assert shares.num_prompt_tokens(256, 1) == PROMPT_BLOCK


@pytest.mark.parametrize(
    ("left", "num_prompt_tokens", "expected"),
    [(1.0, 0, 48), (1.0, 40, 8), (0.0205, 0, 20), (0.0205, 40, 8), (0.0, 0, MIN_FORCED), (0.0, 48, 0), (0.0, 64, 0)],
)
def test_forced_tokens_have_what_is_left(
    shares: TenantShares, clock: Clock, left: float, num_prompt_tokens: int, expected: int
) -> None:
    shares.begin_step({"a", "b"})
    shares.observe_step(0.1)
    shares.observe_step(0.1 + 0.2, 200)  # 1 ms each: 48 in a step
    shares.decode.left = left
    assert shares.num_forced_tokens(256, num_prompt_tokens, 1) == expected
    clock.now += SHARED_FOR
    shares.begin_step({"a"})
    assert shares.num_forced_tokens(256, num_prompt_tokens, 1) == 144 - num_prompt_tokens


@pytest.mark.parametrize(
    ("budget", "wanted", "given"),
    [
        (64, {"a": 100}, {"a": 64}),
        (64, {"a": 100, "b": 100}, {"a": 32, "b": 32}),
        (64, {"a": 100, "b": 10}, {"a": 54, "b": 10}),
        (64, {"a": 5, "b": 100, "c": 25}, {"a": 5, "b": 34, "c": 25}),
        (24, {"a": 100, "b": 100}, {"a": 16, "b": 8}),
        (64, {}, {}),
    ],
)
def test_prompt_tokens_of_a_step_are_divided(
    shares: TenantShares, budget: int, wanted: dict[str, int], given: dict[str, int]
) -> None:
    assert shares.split_prompt_tokens(budget, wanted) == given


def test_tenants_without_prompt_tokens_are_next(shares: TenantShares) -> None:
    wanted = {"a": 100, "b": 100, "c": 100}
    turns = [shares.split_prompt_tokens(PROMPT_BLOCK, wanted) for _ in range(6)]
    assert [next(tenant for tenant, tokens in turn.items() if tokens) for turn in turns] == list("abcabc")
    assert all(sum(turn.values()) == PROMPT_BLOCK for turn in turns)
    # A new one is before all.
    assert shares.split_prompt_tokens(PROMPT_BLOCK, {**wanted, "new": 20})["new"] == PROMPT_BLOCK


def test_one_tenant_limits_its_prompts_beside_what_decodes(shares: TenantShares, clock: Clock) -> None:
    shares.begin_step(["a", "a"])
    shares.observe_step(0.02, 0, 1000)
    shares.observe_step(0.08, 0, 7000)  # 10 ms, and 10 µs for each position
    shares.observe_step(0.01 + 0.2, 200)  # 1 ms for each token of a prompt
    assert shares.num_prompt_tokens(256, 500) == 16  # of 1.5 * 15
    assert shares.num_prompt_tokens(256, 4000) == 64  # of 1.5 * 50
    assert shares.num_prompt_tokens(256, 40_000) == 256
    assert shares.num_prompt_tokens(256, 0) == 256, "nothing waits for them"
    shares.begin_step(["a", "b"])
    assert shares.num_prompt_tokens(256, 4000) == 16  # of half of 50


def test_one_long_chunk_shows_what_prompts_cost(shares: TenantShares) -> None:
    shares.begin_step(["a", "a"])
    shares.observe_step(0.1)
    for _ in range(100):
        shares.observe_step(0.1, 8)  # too short to be measured
    assert shares.num_prompt_tokens(256, 1) == 256
    shares.observe_step(0.1 + 0.256, 256)  # 1 ms each
    assert shares.num_prompt_tokens(256, 1) == 176
