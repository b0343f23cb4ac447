from __future__ import annotations

from collections.abc import Callable

import pytest

from logitship.sampler.sampling_params import SamplingParams
from logitship.server.engine.forward_pass import Plan, ScheduledChunk
from logitship.server.engine.prefill_budget import PrefillBudget
from logitship.server.requests.sequence import Sequence
from logitship.server.tokenizer import Tokenizer

MakeSequence = Callable[[str, int], Sequence]


@pytest.fixture
def make(tokenizer: Tokenizer) -> MakeSequence:
    """Create a sequence from its tenant and the length of its prompt."""

    def sequence(tenant: str, num_prompt: int) -> Sequence:
        return Sequence(
            rid="r",
            index=0,
            names=frozenset({"r"}),
            prompt_token_ids=[5] * num_prompt,
            sampling_params=SamplingParams(),
            max_tokens=9,
            tokenizer=tokenizer,
            sink=lambda chunk: None,
            tenant=tenant,
        )

    return sequence


def learned(make: MakeSequence, decode: float, token: float, size: int = 256) -> PrefillBudget:
    """Make a budget that has seen steps of `decode` seconds, and `token` seconds more for each prompt token."""
    budget = PrefillBudget(size)
    row = ScheduledChunk(make("a", 1), [5])
    for _ in range(30):
        budget.observe(Plan([row], [], 0.0), decode)
        budget.observe(Plan([row], [ScheduledChunk(make("b", 100), [5] * 100)], 0.0), decode + 100 * token)
    return budget


def test_one_tenant_gets_all(make: MakeSequence) -> None:
    budget = learned(make, decode=0.1, token=0.005)
    assert budget.divide([make("a", 1)], [make("a", 300), make("a", 300)]) == {"a": 256}
    assert budget.divide([], [make("a", 300)]) == {"a": 256}
    assert budget.divide([make("a", 1)], []) == {}


@pytest.mark.parametrize(("token", "tokens"), [(0.005, 20), (0.001, 100), (0.1, 16), (0.00001, 256)])
def test_prompts_beside_another_tenants_rows_double_the_time_of_a_step(
    token: float, tokens: int, make: MakeSequence
) -> None:
    budget = learned(make, decode=0.1, token=token)
    (given,) = budget.divide([make("a", 1)], [make("b", 1000)]).values()
    assert abs(given - tokens) <= 1


def test_unknown_times(make: MakeSequence) -> None:
    assert PrefillBudget(256).divide([make("a", 1)], [make("b", 1000)]) == {"b": 64}
    assert PrefillBudget(8).divide([make("a", 1)], [make("b", 1000)]) == {"b": 8}


def test_tenants_get_equal_parts_of_what_they_need(make: MakeSequence) -> None:
    budget = PrefillBudget(90)
    assert budget.divide([], [make("a", 100), make("a", 100), make("b", 100)]) == {"a": 45, "b": 45}
    assert budget.divide([], [make("a", 100), make("b", 10)]) == {"a": 80, "b": 10}
    assert budget.divide([], [make("a", 10), make("b", 20), make("c", 500)]) == {"a": 10, "b": 20, "c": 60}
    assert sum(budget.divide([], [make(tenant, 500) for tenant in "abcdefg"]).values()) == 90


def test_slow_steps_are_learned(make: MakeSequence) -> None:
    budget = learned(make, decode=0.1, token=0.001)
    plan = Plan([ScheduledChunk(make("a", 1), [5])], [ScheduledChunk(make("b", 100), [5] * 100)], 0.0)
    for _ in range(30):
        budget.observe(plan, 0.1 + 100 * 0.005)
    (given,) = budget.divide([make("a", 1)], [make("b", 1000)]).values()
    assert 19 <= given <= 21
