from __future__ import annotations

import random

import pytest
import torch

from logitship.sampler.sampling_params import SamplingParams
from logitship.server.engine import scheduler
from logitship.server.engine.forward_pass import MIN_PROMPT_COST, Plan
from logitship.server.engine.scheduler import Scheduler
from logitship.server.engine.tenant_shares import PROMPT_SHARE, TenantShares
from logitship.server.model.kv_cache import CacheShape, PrefixCache, SlotCache
from logitship.server.requests.messages import FinishReason, GenerationChunk, TokenLogprobs
from logitship.server.requests.sequence import Sequence
from logitship.server.tokenizer import Tokenizer

MAX_LEN = 64


class ScriptedEngine:
    """The scheduler and its cache without a model: the key of a token encodes the token and its position.

    Attributes:
        prompt_tokens: computed prompt tokens, by request.
        sampled: sequences that sampled a first token, each from the right prompt.
        plan: the last step.
    """

    plan: Plan

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_slots: int,
        chunk_size: int,
        shares: TenantShares | None = None,
        reserved_slots: int = 0,
        num_blocks: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        shape = CacheShape(num_layers=2, num_slots=num_slots, num_kv_heads=1, max_len=MAX_LEN, head_dim=1)
        self._cache = SlotCache(shape, torch.float64, torch.device("cpu"))
        prefixes = PrefixCache(self._cache, num_blocks)
        self.scheduler = Scheduler(self._cache, chunk_size, prefixes, shares=shares, reserved_slots=reserved_slots)
        self.prompt_tokens: dict[str, int] = {}
        self.sampled: set[tuple[str, int]] = set()
        self.chunks: list[GenerationChunk] = []

    @property
    def unfinished(self) -> list[Sequence]:
        """Running and waiting sequences."""
        return [*self.scheduler.running, *self.scheduler.waiting]

    def add(self, rid: str, n: int, prompt: list[int], max_tokens: int, *, tenant: str = "") -> list[Sequence]:
        """Queue the sequences of a request. Its prompt log-probabilities are the tokens themselves.

        With a prefix cache, it has none: their tokens would not be taken from there.
        """
        sequences = [
            Sequence(
                rid=rid,
                index=index,
                names=frozenset({rid}),
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(prompt_logprobs=None if self.scheduler.prefixes.stats().capacity else 0),
                max_tokens=max_tokens,
                tokenizer=self._tokenizer,
                sink=self.chunks.append,
                tenant=tenant,
            )
            for index in range(n)
        ]
        self.scheduler.waiting.extend(sequences)
        return sequences

    def step(self) -> None:
        """Do what `Engine.step` does."""
        plan = self.plan = self.scheduler.schedule()
        assert plan, "sequences wait for a prompt that is not computed"
        sampling = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        for chunk in plan.prefill:
            sequence = chunk.sequence
            self.prompt_tokens[sequence.rid] = self.prompt_tokens.get(sequence.rid, 0) + len(chunk.token_ids)
            sequence.prompt_logprobs += [TokenLogprobs(token, 0.0, 1) for token in chunk.token_ids]
        for chunk in plan.chunks:
            self._compute(chunk.sequence, chunk.token_ids)
        self.scheduler.share_prompts()
        for sequence in sampling:
            self._check_history(sequence)
            sequence.append(4 + (7 * sequence.num_computed + sequence.index) % 250, None)
            if sequence.finish_reason is not None:
                self.scheduler.remove(sequence)
        for chunk in plan.prefill:
            if not chunk.sequence.samples and not chunk.sequence.prefilling:
                self.end(chunk.sequence, "length")

    def end(self, sequence: Sequence, kind: str = "abort") -> None:
        """End a sequence from outside."""
        sequence.finish(FinishReason("length" if kind == "length" else "abort"))
        self.scheduler.remove(sequence)

    def run(self) -> None:
        """Step until nothing is left."""
        while self.unfinished:
            self.step()

    def _compute(self, sequence: Sequence, token_ids: list[int]) -> None:
        assert sequence.slot is not None
        for token_id in token_ids:
            position = sequence.num_computed
            for number, layer in enumerate((*self._cache.keys, *self._cache.values)):
                layer[sequence.slot, 0, position] = _mark(number, position, token_id)
            sequence.num_computed += 1

    def _check_history(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        history = [*sequence.prompt_token_ids, *sequence.output_token_ids]
        assert sequence.num_computed == len(history)
        for number, layer in enumerate((*self._cache.keys, *self._cache.values)):
            expected = [_mark(number, position, token_id) for position, token_id in enumerate(history)]
            assert layer[sequence.slot, 0, : len(history), 0].tolist() == expected
        if not sequence.output_token_ids and sequence.sampling_params.prompt_logprobs is not None:
            # All but the last token, which is only there if this sequence computed the prompt.
            records = [record.token_id for record in sequence.prompt_logprobs]
            assert records[: sequence.num_prompt - 1] == sequence.prompt_token_ids[:-1]
            self.sampled.add((sequence.rid, sequence.index))


def _mark(layer: int, position: int, token_id: int) -> float:
    return layer * 1e6 + position * 1e3 + token_id


def prompt_of(length: int, begin: int = 4) -> list[int]:
    return [begin + k % 200 for k in range(length)]


def test_prompt_is_computed_once(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, num_slots=8, chunk_size=7)
    sequences = engine.add("r", 6, prompt_of(30), max_tokens=3)
    other = engine.add("other", 1, prompt_of(30), max_tokens=3)
    engine.run()
    assert engine.prompt_tokens == {"r": 30 + 5, "other": 30}
    assert [sequence.num_copied for sequence in (*sequences, *other)] == [0, *[29] * 5, 0]
    assert len(engine.sampled) == 7


def test_shared_before_the_first_sequence_finishes(tokenizer: Tokenizer) -> None:
    for max_tokens in (0, 1):
        engine = ScriptedEngine(tokenizer, num_slots=4, chunk_size=256)
        engine.add("r", 4, prompt_of(30), max_tokens)
        engine.run()
        assert engine.prompt_tokens == {"r": 30 + 3}


def test_cancelled_prompt_is_not_continued(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, num_slots=2, chunk_size=8)
    (sequence,) = engine.add("cancelled", 1, list(range(10, 50)), max_tokens=2)
    engine.step()
    engine.end(sequence)
    engine.add("next", 1, list(range(60, 64)), max_tokens=2)
    engine.step()
    assert engine.prompt_tokens == {"cancelled": 8, "next": 4}


def test_prompt_of_one_token_is_not_shared(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, num_slots=4, chunk_size=256)
    sequences = engine.add("r", 4, [5], max_tokens=2)
    engine.step()
    assert [len(sequence.output_token_ids) for sequence in sequences] == [1] * 4
    assert [sequence.num_copied for sequence in sequences] == [0] * 4
    engine.run()


def test_next_sequence_takes_over_when_first_ends(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, num_slots=4, chunk_size=10)
    first, second, third = engine.add("r", 3, prompt_of(30), max_tokens=2)
    engine.step()
    assert (first.num_computed, second.num_computed, third.num_computed) == (10, 0, 0)
    engine.end(first)
    engine.step()
    assert (second.num_computed, third.num_computed) == (10, 0)
    engine.end(third)
    engine.run()
    assert second.num_copied == 0
    assert engine.sampled == {("r", 1)}


def test_late_sequence_copies_from_running_one(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, num_slots=2, chunk_size=256)
    sequences = engine.add("r", 3, prompt_of(20), max_tokens=8)
    engine.step()
    engine.step()
    engine.end(sequences[0])
    engine.step()
    assert len(sequences[2].output_token_ids) == 1
    assert engine.prompt_tokens == {"r": 20 + 2}
    engine.run()
    late = [chunk for chunk in engine.chunks if chunk.index == 2]
    assert [record.token_id for record in late[0].prompt_logprobs][:19] == prompt_of(20)[:19]
    assert not any(chunk.prompt_logprobs for chunk in late[1:])
    assert {chunk.cached_tokens for chunk in late} == {19}


def test_sequence_after_all_others_computes_again(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, num_slots=1, chunk_size=256)
    sequences = engine.add("r", 2, prompt_of(20), max_tokens=2)
    engine.run()
    assert [sequence.num_copied for sequence in sequences] == [0, 0]
    assert len(engine.sampled) == 2


def test_tenants_with_equal_request_ids_share_nothing(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, num_slots=4, chunk_size=5)
    sequences = [
        *engine.add("r", 2, prompt_of(20), max_tokens=2, tenant="a"),
        *engine.add("r", 2, prompt_of(25, begin=50), max_tokens=2, tenant="b"),
    ]
    engine.run()
    assert [sequence.num_copied for sequence in sequences] == [0, 19, 0, 24]


def step_or_abort(engine: ScriptedEngine, rng: random.Random) -> None:
    if rng.random() < 0.1:
        engine.end(rng.choice(engine.unfinished))
    else:
        engine.step()


def test_random_schedules(tokenizer: Tokenizer) -> None:
    """Random requests, sizes and aborts: every sequence samples from its own prompt and finishes."""
    for seed in range(100):
        rng = random.Random(seed)
        engine = ScriptedEngine(tokenizer, num_slots=rng.randint(1, 6), chunk_size=rng.choice([1, 3, 8, 256]))
        added: list[Sequence] = []
        for number in range(rng.randint(1, 5)):
            prompt = prompt_of(rng.choice([1, 2, 3, 17, 40]), begin=4 + number)
            added += engine.add(f"r{number}", rng.randint(1, 7), prompt, rng.randint(0, 5))
            while engine.unfinished and rng.random() < 0.5:
                step_or_abort(engine, rng)
        while engine.unfinished:
            step_or_abort(engine, rng)
        ended = [chunk for chunk in engine.chunks if chunk.finish_reason is not None]
        assert len(ended) == len(added)
        assert all(sequence.slot is None for sequence in added)


@pytest.mark.thorough
def test_random_schedules_of_tenants(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached prompts, copies and aborts of three tenants: each of them goes on every few steps."""
    monkeypatch.setattr(scheduler, "SHARED_COPIED_POSITIONS", 16)
    for seed in range(60):
        rng = random.Random(seed)
        shares = TenantShares()
        shares.observe_step(0.1)
        shares.observe_step(0.1 + 0.002, num_prompt_tokens=1)  # 16 prompt tokens a step
        engine = ScriptedEngine(
            tokenizer, num_slots=32, chunk_size=64, shares=shares, num_blocks=rng.choice([0, 4, 20])
        )
        added: list[Sequence] = []
        idle = dict.fromkeys("abc", 0)
        while len(added) < 40 or engine.unfinished:
            if len(added) < 40 and (rng.random() < 0.3 or not engine.unfinished):
                tenant = rng.choice("aaabc")
                prompt = prompt_of(rng.choice([3, 17, 40]), begin=rng.choice([4, 50]))
                added += engine.add(
                    f"r{len(added)}", rng.choice([1, 1, 2, 20]), prompt, rng.randint(1, 20), tenant=tenant
                )
            if rng.random() < 0.05:
                engine.end(rng.choice(engine.unfinished))
                continue
            before = {sequence: sequence.num_computed for sequence in engine.scheduler.running}
            shares.begin_step([sequence.tenant for sequence in before])
            engine.step()
            for tenant in idle:
                own = [sequence for sequence in before if sequence.tenant == tenant]
                stands = own and all(sequence.num_computed == before[sequence] for sequence in own)
                idle[tenant] = idle[tenant] + 1 if stands else 0
            assert max(idle.values()) <= len(idle), seed
        assert all(sequence.slot is None for sequence in added)


def test_reserved_slots_are_for_tenants_with_few(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, num_slots=8, chunk_size=64, reserved_slots=2)
    many = engine.add("many", 10, [5, 6], 30, tenant="a")
    engine.step()
    assert sum(sequence.slot is not None for sequence in many) == 6
    few = engine.add("few", 3, [5, 6], 30, tenant="b")
    engine.step()
    assert sum(sequence.slot is not None for sequence in few) == 2
    for sequence in many[:2]:
        engine.end(sequence)
    engine.step()
    # Two are free, and reserved again: the other tenants have more than two.
    assert [sum(sequence.slot is not None for sequence in each) for each in (many, few)] == [4, 2]


def test_short_prompts_count_as_eight_tokens(tokenizer: Tokenizer) -> None:
    """A burst of them beside another tenant: a step that begins them all would take as long as one for all of them."""
    shares = TenantShares()
    shares.observe_step(0.1)
    shares.observe_step(0.1 + 0.002, num_prompt_tokens=1)  # 16 prompt tokens a step
    engine = ScriptedEngine(tokenizer, num_slots=32, chunk_size=64, shares=shares)
    shares.begin_step({"a", "b"})
    engine.add("decoding", 1, [5, 6], 99, tenant="a")
    engine.step()
    burst = engine.add("other prompt", 1, [9] * 6, 9, tenant="b")
    for number in range(12):
        burst += engine.add(f"r{number}", 1, [7 + number], 9, tenant="b")
    started = []
    for _ in range(5):
        engine.step()
        started.append(sum(not sequence.prefilling for sequence in burst))
    assert started == [2, 4, 6, 8, 10]


def test_prompts_of_tenants_take_turns(tokenizer: Tokenizer) -> None:
    shares = TenantShares()
    engine = ScriptedEngine(tokenizer, num_slots=8, chunk_size=32, shares=shares)
    for number in range(3):
        engine.add(f"long{number}", 1, [5 + number] * 60, 1, tenant="a")
    shares.begin_step({"a", "b"})
    engine.step()
    engine.add("short", 1, [9] * 16, 1, tenant="b")
    engine.step()
    assert engine.prompt_tokens["short"] == 16


def test_earlier_prompts_do_not_delay_a_short_one(tokenizer: Tokenizer) -> None:
    shares = TenantShares()
    engine = ScriptedEngine(tokenizer, num_slots=8, chunk_size=16, shares=shares)
    shares.begin_step({"a", "b"})
    for number in range(5):
        engine.add(f"earlier{number}", 1, [5 + number] * 48, 1, tenant="b")
        for _ in range(3):
            engine.step()
    engine.add("long", 1, [9] * 60, 1, tenant="a")
    engine.step()
    engine.add("short", 1, [10] * 16, 1, tenant="b")
    engine.step()
    engine.step()
    assert engine.prompt_tokens["short"] == 16
    assert engine.prompt_tokens["long"] < 60


def test_prompts_are_copied_one_per_step_beside_other_tenants(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "SHARED_COPIED_POSITIONS", 20)
    shares = TenantShares()
    engine = ScriptedEngine(tokenizer, num_slots=8, chunk_size=64, shares=shares)
    shares.begin_step({"a", "b"})
    many = engine.add("many", 6, prompt_of(40), 20, tenant="a")
    engine.step()
    begun = []
    for _ in range(6):
        begun.append(sum(not sequence.needs_prompt for sequence in many))
        engine.step()
    assert begun == [1, 2, 3, 4, 5, 6]
    shares.begin_step({"a"})
    engine.run()
    assert engine.prompt_tokens["many"] == 40 + 5  # each computes its last one
    assert engine.sampled == {("many", index) for index in range(6)}


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("n", [1, 6])
def test_copies_for_one_tenant_do_not_hold_up_the_prompts_of_another(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, n: int, is_cached: bool
) -> None:
    """One tenant has requests with a cached prompt, or one request with many continuations."""
    monkeypatch.setattr(scheduler, "SHARED_COPIED_POSITIONS", 16)
    shares = TenantShares()
    engine = ScriptedEngine(tokenizer, num_slots=8, chunk_size=64, shares=shares, num_blocks=8)
    engine.add("first", 1, prompt_of(40), 1, tenant="a")
    engine.add("cached" if is_cached else "else", 1, prompt_of(20, begin=50 if is_cached else 90), 1, tenant="b")
    engine.run()
    many = [one for number in range(6 // n) for one in engine.add(f"many{number}", n, prompt_of(40), 20, tenant="a")]
    begun = []
    for _ in range(5):
        shares.begin_step({"a", "b"})
        engine.step()
        begun.append((sum(one.num_computed > 0 for one in many), "other" in engine.prompt_tokens))
        if len(begun) == 1:
            engine.add("other", 1, prompt_of(20, begin=50), 20, tenant="b")
    if is_cached:
        assert begun == [(1, False), (2, False), (2, True), (3, True), (4, True)]
    else:
        assert begun == [(1, False), (2, True), (3, True), (4, True), (5, True)]
    engine.run()


def test_copies_that_wait_when_their_source_ends(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "SHARED_COPIED_POSITIONS", 20)
    shares = TenantShares()
    engine = ScriptedEngine(tokenizer, num_slots=8, chunk_size=64, shares=shares)
    shares.begin_step({"a", "b"})
    engine.add("many", 4, prompt_of(40), 1, tenant="a")
    engine.run()
    assert engine.sampled == {("many", index) for index in range(4)}


def test_prompts_take_half_of_a_step_beside_other_tenants(tokenizer: Tokenizer) -> None:
    shares = TenantShares()
    shares.observe_step(0.1)
    shares.observe_step(0.1 + 256 * 0.001, 256)
    engine = ScriptedEngine(tokenizer, num_slots=8, chunk_size=64, shares=shares)
    engine.add("decodes", 1, [5], 30, tenant="a")
    engine.step()
    shares.begin_step({"a", "b"})
    engine.add("long", 1, [6] * 60, 1, tenant="b")
    engine.step()
    assert engine.prompt_tokens["long"] == 48  # of 50, a multiple of 16
    shares.begin_step({"b"})
    engine.step()
    assert engine.prompt_tokens["long"] == 60


def shares_of_one_tenant(prompt_tokens: int) -> TenantShares:
    """Return shares that allow a step so many prompt tokens beside decoding sequences while one tenant is alone."""
    shares = TenantShares()
    shares.observe_step(1.0)
    shares.observe_step(1.0 + PROMPT_SHARE / prompt_tokens, num_prompt_tokens=1)
    return shares


def test_prompts_are_limited_beside_sequences_of_their_tenant(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, num_slots=8, chunk_size=64, shares=shares_of_one_tenant(16))
    engine.add("first", 1, prompt_of(60), 30)
    engine.step()
    assert engine.prompt_tokens["first"] == 60, "nothing decodes yet"
    engine.add("second", 1, prompt_of(60, begin=9), 1)
    computed = []
    for _ in range(4):
        engine.step()
        computed.append(engine.prompt_tokens["second"])
    assert computed == [16, 32, 48, 60]


def test_limited_prompts_are_computed_in_order(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, num_slots=8, chunk_size=64, shares=shares_of_one_tenant(32))
    engine.add("decodes", 1, [5], 40)
    engine.step()
    for number in range(3):
        engine.add(f"r{number}", 1, prompt_of(40, begin=9 + number), 1)
    engine.step()
    assert engine.prompt_tokens == {"decodes": 1, "r0": 32}
    engine.step()
    assert engine.prompt_tokens == {"decodes": 1, "r0": 40, "r1": 24}


def test_cancelled_prompt_leaves_its_part_to_the_next(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, num_slots=8, chunk_size=64, shares=shares_of_one_tenant(16))
    engine.add("decodes", 1, [5], 40)
    engine.step()
    (cancelled,) = engine.add("cancelled", 1, prompt_of(60, begin=9), 1)
    engine.add("next", 1, prompt_of(60, begin=99), 1)
    engine.step()
    engine.end(cancelled)
    engine.step()
    assert engine.prompt_tokens == {"decodes": 1, "cancelled": 16, "next": 16}


@pytest.mark.parametrize(("n", "expected"), [(6, [0, 2, 4, 5]), (1, [2, 4, 6, 6])])
def test_copies_are_limited_beside_sequences_of_their_tenant(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, n: int, expected: list[int]
) -> None:
    """Continuations of one request, or requests with a cached prompt."""
    monkeypatch.setattr(scheduler, "COPIED_POSITIONS", 40)
    engine = ScriptedEngine(tokenizer, num_slots=8, chunk_size=64, num_blocks=8 if n == 1 else 0)
    engine.add("first", 1, prompt_of(40), 1)
    engine.add("decodes", 1, [5], 40)
    engine.step()
    many = [one for number in range(6 // n) for one in engine.add(f"{number}", n, prompt_of(40), 9)]
    begun = []
    for _ in range(4):
        engine.step()
        begun.append(sum(one.num_copied > 0 for one in many))
    assert begun == expected


def test_random_schedules_of_one_tenant(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding sequences and the oldest prompt go on in each step, with few prompt tokens and copies beside them."""
    monkeypatch.setattr(scheduler, "COPIED_POSITIONS", 30)
    longest = 40
    for seed in range(20):
        rng = random.Random(seed)
        limit = rng.choice([16, 32])
        engine = ScriptedEngine(
            tokenizer,
            num_slots=rng.choice([4, 16]),
            chunk_size=64,
            shares=shares_of_one_tenant(limit),
            num_blocks=rng.choice([0, 4, 20]),
        )
        added: list[Sequence] = []
        cancelled: set[Sequence] = set()
        while len(added) < 60 or engine.unfinished:
            if len(added) < 60 and (rng.random() < 0.4 or not engine.unfinished):
                prompt = prompt_of(rng.choice([1, 3, 17, longest]), begin=rng.choice([4, 50]))
                added += engine.add(f"r{len(added)}", rng.choice([1, 1, 1, 9]), prompt, rng.randint(1, 20))
                continue
            if rng.random() < 0.2:
                cancelled.add(one := rng.choice(engine.unfinished))
                engine.end(one)
                continue
            copied = sum(one.num_copied for one in added)
            decoding = {one for one in engine.scheduler.running if not one.prefilling}
            oldest = next((one for one in engine.scheduler.running if one.prefilling), None)
            before = oldest.num_computed if oldest else 0
            engine.step()
            plan = engine.plan
            assert {chunk.sequence for chunk in plan.decode} == decoding, seed
            assert oldest is None or oldest.num_computed > before, seed
            assert cancelled.isdisjoint(chunk.sequence for chunk in plan.chunks), seed
            if plan.decode:
                assert plan.prompt_cost < limit + MIN_PROMPT_COST, seed
                assert sum(one.num_copied for one in added) - copied < 30 + longest, seed
        assert all(sequence.slot is None for sequence in added)
