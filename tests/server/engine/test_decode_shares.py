"""Sequences of several tenants take turns in decoding steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from logitship.server.engine.decode_shares import DECODE_SHARE, DecodeShares, split
from logitship.server.engine.forward_pass import SEQUENCE_COST, positions
from logitship.server.metrics.step_clock import StepTime

BASE = 0.04
PER_POSITION = 3e-6


@dataclass(eq=False)
class Running:
    """A sequence, as far as its share depends on it."""

    tenant: str
    num_computed: int
    prefilling: bool = False
    group: list[Running] = field(default_factory=list)

    @property
    def lead(self) -> Running:
        return self.group[0] if self.group else self


@pytest.fixture
def shares() -> DecodeShares:
    return DecodeShares(StepTime(PER_POSITION, BASE))


def select(shares: DecodeShares, running: list[Running], prompts: float = 0.0) -> list[Running]:
    chosen: list[Any] = shares.select(running, prompts)  # type: ignore[arg-type]
    return chosen


def seconds(chosen: list[Running]) -> float:
    return BASE + PER_POSITION * positions([one for one in chosen if not one.prefilling])  # type: ignore[arg-type]


def test_one_tenant_has_all_of_a_step(shares: DecodeShares) -> None:
    running = [Running("a", 6000) for _ in range(28)]
    assert select(shares, running) == running


def test_sequences_within_the_share_are_not_held_up(shares: DecodeShares) -> None:
    few = Running("a", 50)
    share = DECODE_SHARE * BASE + PER_POSITION * (50 + SEQUENCE_COST)
    most = int(share / (PER_POSITION * (60 + SEQUENCE_COST)))
    many = [Running("b", 60) for _ in range(most + 1)]
    assert select(shares, [few, *many[:most]]) == [few, *many[:most]]
    assert len(select(shares, [few, *many])) == 1 + most, "one more would exceed the share"


@pytest.mark.parametrize(("prompts", "share"), [(0.0, 1.0), (0.002, 1 - 0.002 / (DECODE_SHARE * BASE)), (1.0, 0.5)])
def test_prompts_take_up_to_half_of_the_share(shares: DecodeShares, prompts: float, share: float) -> None:
    few = Running("a", 50)
    many = [Running("b", 1000) for _ in range(28)]
    chosen = [len(select(shares, [few, *many], prompts)) - 1 for _ in range(1000)]
    seconds_of_many = sum(chosen) / len(chosen) * PER_POSITION * (1000 + SEQUENCE_COST)
    assert seconds_of_many == pytest.approx(share * DECODE_SHARE * BASE + PER_POSITION * (50 + SEQUENCE_COST), rel=0.02)


def test_tenants_with_as_much_work_are_not_held_up(shares: DecodeShares) -> None:
    running = [Running(f"t{number % 8}", 6000) for number in range(32)]
    assert select(shares, running) == running


@pytest.mark.parametrize("context", [1000, 6000, 30_000])
def test_long_sequences_take_turns(shares: DecodeShares, context: int) -> None:
    few = Running("a", 50)
    many = [Running("b", context) for _ in range(28)]
    times = []
    turns = dict.fromkeys(many, 0)
    for _ in range(2000):
        chosen = select(shares, [few, *many])
        assert chosen[0] is few
        times.append(seconds(chosen))
        for one in chosen[1:]:
            turns[one] += 1
    alone = seconds([few])
    assert sum(times) / len(times) <= 2 * alone
    assert max(times) <= 2 * alone + PER_POSITION * (context + SEQUENCE_COST)  # one more at most
    assert max(turns.values()) - min(turns.values()) <= 1
    share = DECODE_SHARE * BASE + PER_POSITION * (50 + SEQUENCE_COST)
    assert sum(turns.values()) == pytest.approx(2000 * share / (PER_POSITION * (context + SEQUENCE_COST)), rel=0.02)


def test_beams_have_their_turn_together(shares: DecodeShares) -> None:
    few = Running("a", 50)
    beams = [Running("b", 3000) for _ in range(20)]
    for beam in beams:
        beam.group = beams
    sizes = [len(select(shares, [few, *beams])) for _ in range(100)]
    assert set(sizes) == {1, 21}
    assert sizes.count(21) == pytest.approx(
        100 * (DECODE_SHARE * BASE) / (20 * (3000 + SEQUENCE_COST) * PER_POSITION), abs=2
    )


def test_prompts_are_not_left_out(shares: DecodeShares) -> None:
    running = [Running("a", 50), *(Running("b", 6000) for _ in range(10)), Running("b", 6000, prefilling=True)]
    assert select(shares, running)[-1] is running[-1]


def test_long_sequences_take_turns_beside_a_prompt(shares: DecodeShares) -> None:
    """Otherwise, a request would wait for its first token as long as a step with all sequences of another takes."""
    running = [*(Running("b", 6000) for _ in range(10)), Running("a", 0, prefilling=True)]
    for _ in range(20):
        assert seconds(select(shares, running)) <= BASE * (1 + 2 * DECODE_SHARE), "with what was saved before"
    assert {one for _ in range(20) for one in select(shares, running)} == set(running)


def test_somebody_always_takes_part(shares: DecodeShares) -> None:
    rng = random.Random(1)
    for _ in range(300):
        running = [Running(rng.choice("abc"), rng.randrange(20_000)) for _ in range(rng.randint(1, 32))]
        chosen = select(shares, running)
        assert chosen
        assert [one for one in running if one in chosen] == chosen


@pytest.mark.parametrize(
    ("most", "wanted", "given"),
    [
        (10, {"a": 1, "b": 20}, {"a": 1, "b": 9}),
        (10, {"a": 20, "b": 20}, {"a": 5, "b": 5}),
        (10, {"a": 20, "b": 4, "c": 1}, {"a": 5, "b": 4, "c": 1}),
        (10, {"a": 1, "b": 2}, {"a": 1, "b": 2}),
    ],
)
def test_split(most: float, wanted: dict[str, float], given: dict[str, float]) -> None:
    assert split(most, wanted) == given


def test_left_is_what_no_sequence_uses(shares: DecodeShares) -> None:
    short = [Running("a", 0), Running("b", 0)]
    select(shares, short)
    cost = PER_POSITION * SEQUENCE_COST
    assert shares.left == pytest.approx(DECODE_SHARE * BASE + 2 * cost - 2 * cost)
    select(shares, short, prompts=0.01)
    assert shares.left == pytest.approx(DECODE_SHARE * BASE - 0.01)
    select(shares, [*short, *(Running("b", 3000) for _ in range(10))])
    assert shares.left == 0.0
