from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

import pytest
import torch

from logitship.builtin_processors.parameter_processors import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from logitship.client.errors import ProcessorFault
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor, MoveDirectionality
from logitship.sampler.batch_processors.logits_processors import ForcingLogitsProcessor, LogitsProcessors
from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.sampler.row_errors import NonFiniteLogitsError, NoTokenLeftError
from logitship.sampler.sampler import Sampler, SamplerOutput
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.trace import StepTrace
from tests.helpers.random_cases import random_seeds

CPU = torch.device("cpu")
INF = math.inf
GREEDY = SamplingParams(temperature=0)


def builtin_processors() -> list[LogitsProcessor]:
    types = (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
    return [processor_type(None, CPU, False) for processor_type in types]


def make_sampler(
    vocab_size: int, *extra: LogitsProcessor, shipped: Shipped | None = None, rows: list[SamplingParams]
) -> Sampler:
    """Create a sampler with these requests at rows 0, 1, ..., without prompts and outputs."""
    sampler = Sampler(vocab_size, CPU, LogitsProcessors([*builtin_processors(), *extra]), shipped)
    sampler.update_state(BatchUpdate(len(rows), [], [(row, params, [], []) for row, params in enumerate(rows)], []))
    return sampler


def sample_alone(
    logits: torch.Tensor, params: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None
) -> SamplerOutput:
    """Sample one step of one request in a batch of its own."""
    sampler = Sampler(len(logits), CPU, LogitsProcessors(builtin_processors()), None)
    sampler.update_state(BatchUpdate(1, [], [(0, params, prompt, output or [])], []))
    return sampler.sample(logits[None].clone())


class Edit(LogitsProcessor):
    """A batch processor that calls a function."""

    def __init__(self, edit: Callable[[torch.Tensor], torch.Tensor], invariant: bool = False) -> None:
        self.edit = edit
        self.invariant = invariant
        self.seen: list[torch.Tensor] = []

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self.seen.append(logits.clone())
        return self.edit(logits)

    def is_argmax_invariant(self) -> bool:
        return self.invariant

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.updated = batch_update


class Forcing(Edit, ForcingLogitsProcessor):
    """Calls a function at step 4."""


class Shipped(Edit, ShippedProcessors):
    """A stage of shipped processors that calls a function and reports faults."""

    def __init__(self, edit: Callable[[torch.Tensor], torch.Tensor], *faults: tuple[int, ProcessorFault]) -> None:
        super().__init__(edit)
        self.faults = list(faults)

    def watch(self, trace: StepTrace) -> None:
        self.trace = trace

    def take_faults(self) -> list[tuple[int, ProcessorFault]]:
        return self.faults

    def take_deferred(self) -> list[int]:
        return []

    def fault_of(self, row: int, logits: torch.Tensor) -> ProcessorFault | None:
        return None


def same(logits: torch.Tensor) -> torch.Tensor:
    return logits


def force(row: int, token: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(logits: torch.Tensor) -> torch.Tensor:
        kept = logits[row, token].clone()
        logits[row] = -INF
        logits[row, token] = kept if kept.isfinite() else 0.0
        return logits

    return edit


# ---- the whole pipeline, compared with a plain loop


def reference_processed_logprobs(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]
) -> list[float]:
    """Compute steps 1 to 9, and the filters of step 10, with Python numbers, token by token."""
    vocab = range(len(logits))
    logits = list(logits)
    forbidden = set() if params.allowed_token_ids is None else set(vocab) - params.allowed_token_ids
    for *beginning, ending in params.bad_words_token_ids:
        if output[len(output) - len(beginning) :] == beginning and len(output) >= len(beginning):
            forbidden.add(ending)
    if len(output) < params.min_tokens:
        forbidden |= params.all_stop_token_ids
    for token in vocab:
        value = logits[token] + params.logit_bias.get(token, 0.0)
        if token in prompt or token in output:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * output.count(token)
        value -= params.presence_penalty * (token in output)
        logits[token] = -INF if token in forbidden else value / (params.temperature or 1.0)
    peak = max(logits)
    if not params.greedy and params.min_p > 0:
        logits = [value if value >= peak + math.log(params.min_p) else -INF for value in logits]
    if not params.greedy:
        ranking = sorted(vocab, key=lambda token: -logits[token])
        if 0 < params.top_k < len(logits):
            kth = logits[ranking[params.top_k - 1]]
            logits = [value if value >= kth else -INF for value in logits]
        weights = [math.exp(value - peak) for value in logits]
        reached = 0.0
        for token in ranking:
            if params.top_p < 1 and reached >= params.top_p * sum(weights):
                logits[token] = -INF
            reached += weights[token]
    total = math.log(sum(math.exp(value - peak) for value in logits)) + peak
    return [value - total for value in logits]


def random_params(rng: random.Random, vocab_size: int, **fixed: object) -> SamplingParams:
    def sometimes(value: object, default: object) -> object:
        return value if rng.random() < 0.5 else default

    def tokens(count: int) -> list[int]:
        return rng.sample(range(vocab_size), count)

    temperature = rng.choice([0.0, 0.3, 1.0, 1.7])
    chosen: dict[str, object] = {
        "temperature": temperature,
        "top_p": sometimes(rng.uniform(0.1, 1), 1.0),
        "top_k": sometimes(rng.randint(1, vocab_size + 5), -1),
        "min_p": sometimes(rng.uniform(0, 0.3), 0.0),
        "repetition_penalty": sometimes(rng.uniform(0.5, 2), 1.0),
        "frequency_penalty": sometimes(rng.uniform(-2, 2), 0.0),
        "presence_penalty": sometimes(rng.uniform(-2, 2), 0.0),
        "seed": rng.randrange(2**64),
        "min_tokens": sometimes(rng.randint(1, 5), 0),
        "stop_token_ids": frozenset(tokens(3)),
        "logit_bias": sometimes({token: rng.uniform(-5, 5) for token in tokens(5)}, {}),
        "allowed_token_ids": sometimes(frozenset(tokens(vocab_size // 2)), None),
        "bad_words_token_ids": sometimes(tuple(tuple(tokens(rng.randint(1, 2))) for _ in range(20)), ()),
        "logprobs": sometimes(rng.randint(0, 9), None),
        "logprobs_mode": rng.choice(["raw_logprobs", "processed_logprobs"]),
    }
    return SamplingParams(**{**chosen, **fixed})  # type: ignore[arg-type]


@random_seeds(40)
def test_processed_logprobs_match_plain_loop(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    vocab_size = 50
    params = random_params(rng, vocab_size, logprobs=vocab_size, logprobs_mode="processed_logprobs")
    prompt = [rng.randrange(vocab_size) for _ in range(8)]
    output = [rng.randrange(vocab_size) for _ in range(rng.randint(0, 12))]
    logits = torch.randn(vocab_size) * 3
    result = sample_alone(logits, params, prompt, output)
    assert result.faults == []
    [record] = result.logprobs
    assert record is not None
    expected = reference_processed_logprobs(logits.tolist(), params, prompt, output)
    got = dict(record.top)
    assert [got[token] for token in range(vocab_size)] == pytest.approx(expected, abs=1e-4)
    assert record.logprob == got[record.token_id] > -INF
    if params.greedy:
        assert expected[record.token_id] == max(expected)


# ---- the persistent batch


Request = tuple[SamplingParams, list[int], list[int]]


def change_batch(rng: random.Random, batch: list[Request], vocab_size: int) -> BatchUpdate:
    """Remove and add requests, close the gaps and swap two rows; apply the same changes to `batch`."""
    gaps = sorted(rng.sample(range(len(batch)), rng.randint(0, min(2, len(batch)))))
    added = []
    for _ in range(rng.randint(0, 2)):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 20))]
        request: Request = (random_params(rng, vocab_size), prompt, [])
        if gaps:
            row = gaps.pop(0)
            batch[row] = request
        else:
            row = len(batch)
            batch.append(request)
        added.append((row, *request))
    removed, moved = list(gaps), []
    while gaps:
        last = len(batch) - 1
        request = batch.pop()
        if last == gaps[-1]:
            gaps.pop()
        else:
            gap = gaps.pop(0)
            batch[gap] = request
            moved.append((last, gap, MoveDirectionality.UNIDIRECTIONAL))
    if len(batch) > 1:
        a, b = rng.sample(range(len(batch)), 2)
        batch[a], batch[b] = batch[b], batch[a]
        moved.append((a, b, MoveDirectionality.SWAP))
    return BatchUpdate(len(batch), removed, added, moved)


@pytest.mark.slow
@random_seeds(8)
def test_rows_are_batch_invariant(seed: int) -> None:
    """In random schedules, each row equals a fresh batch of one bit for bit."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    vocab_size = 150
    sampler = Sampler(vocab_size, CPU, LogitsProcessors(builtin_processors()), None)
    batch: list[Request] = []
    for step in range(60):
        sampler.update_state(change_batch(rng, batch, vocab_size) if step % 2 == 0 else None)
        logits = torch.randn(len(batch), vocab_size) * 4
        result = sampler.sample(logits.clone())
        assert result.faults == []
        for row, (params, prompt, output) in enumerate(batch):
            alone = sample_alone(logits[row], params, prompt, list(output))
            assert result.token_ids[row] == alone.token_ids[0]
            assert result.logprobs[row] == alone.logprobs[0]
            assert (result.logprobs[row] is None) == (params.logprobs is None)
            output.append(result.token_ids[row])


@pytest.mark.slow
@random_seeds(4)
def test_subsets_of_rows_are_batch_invariant(seed: int) -> None:
    """As in speculative decoding: fewer rows at each position, with outputs that grow in between."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    vocab_size = 150
    sampler = Sampler(vocab_size, CPU, LogitsProcessors(builtin_processors()), None)
    batch: list[Request] = []
    for _ in range(30):
        sampler.update_state(change_batch(rng, batch, vocab_size))
        rows = list(range(len(batch)))
        for depth in range(4):
            logits = torch.randn(len(rows), vocab_size) * 4
            result = sampler.sample(logits.clone(), rows if depth else None)
            assert result.faults == []
            for place, row in enumerate(rows):
                params, prompt, output = batch[row]
                alone = sample_alone(logits[place], params, prompt, list(output))
                assert result.token_ids[place] == alone.token_ids[0]
                assert result.logprobs[place] == alone.logprobs[0]
                output.append(result.token_ids[place])
            rows = sorted(rng.sample(rows, rng.randrange(len(rows) + 1)))
            sampler.update_state(None)


def test_processor_without_spec_decode_rejects_subset_of_rows() -> None:
    sampler = make_sampler(5, Edit(same), rows=[GREEDY, GREEDY])
    sampler.sample(torch.zeros(2, 5))
    with pytest.raises(TypeError, match="Edit has no apply_with_spec_decode"):
        sampler.sample(torch.zeros(1, 5), [1])


def test_tokens_depend_on_seed() -> None:
    logits = torch.zeros(1000)

    def tokens(seed: int) -> list[int]:
        output: list[int] = []
        for _ in range(10):
            output += sample_alone(logits, SamplingParams(seed=seed), [], output).token_ids
        return output

    assert tokens(7) == tokens(7)
    assert tokens(7) != tokens(8)
    assert len(set(tokens(7))) > 5
    assert tokens(-1) == tokens(2**64 - 1)


def test_random_row_without_seed_is_rejected() -> None:
    with pytest.raises(ValueError, match="seed"):
        make_sampler(5, rows=[SamplingParams()])
    assert make_sampler(5, rows=[GREEDY]).sample(torch.eye(5)[:1]).token_ids == [0]


def test_wrong_logits_shape_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"expected shape \(1, 5\), got \(2, 5\)"):
        make_sampler(5, rows=[GREEDY]).sample(torch.zeros(2, 5))


def test_empty_batch() -> None:
    sampler = Sampler(5, CPU, LogitsProcessors(builtin_processors()), None)
    assert sampler.sample(torch.empty(0, 5)) == SamplerOutput([], [], [], [], [])


def test_sampled_tokens_follow_distribution() -> None:
    """Chi-square test over many seeds, with temperature and top-k."""
    torch.manual_seed(0)
    logits = torch.randn(30)
    count = 4000
    sampler = make_sampler(30, rows=[SamplingParams(temperature=0.7, top_k=12, seed=seed) for seed in range(count)])
    tokens = torch.tensor(sampler.sample(logits.repeat(count, 1)).token_ids)
    kept = logits.double().masked_fill(logits < logits.topk(12).values[-1], -INF)
    expected = (kept / 0.7).softmax(-1) * count
    hits = torch.bincount(tokens, minlength=30)
    assert (hits[expected == 0] == 0).all()
    # 11 degrees of freedom: mean 11, standard deviation 4.7.
    assert float(((hits - expected) ** 2 / expected)[expected > 0].sum()) < 11 + 5 * 4.7


# ---- the order of the steps


def test_processors_run_in_contract_order() -> None:
    order: list[str] = []

    def note(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def edit(logits: torch.Tensor) -> torch.Tensor:
            order.append(name)
            return logits.clone()

        return edit

    changing, invariant = Edit(note("changing")), Edit(note("invariant"), invariant=True)
    forcing = Forcing(note("forcing"))
    shipped = Shipped(note("shipped"))
    params = SamplingParams(temperature=0.5, seed=1, presence_penalty=1.0, allowed_token_ids=frozenset({0, 1, 2}))
    sampler = Sampler(4, CPU, LogitsProcessors([invariant, forcing, changing]), shipped)
    sampler.update_state(BatchUpdate(1, [], [(0, params, [], [2])], []))
    sampler.sample(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    assert order == ["changing", "forcing", "shipped", "invariant"]
    assert changing.seen[0].tolist() == [[1.0, 2.0, 3.0, -INF]]  # after the masks, before the penalties
    assert forcing.seen[0].tolist() == [[1.0, 2.0, 2.0, -INF]]  # after the penalties
    assert shipped.seen[0].tolist() == [[1.0, 2.0, 2.0, -INF]]
    assert invariant.seen[0].tolist() == [[2.0, 4.0, 4.0, -INF]]  # after the temperature


def test_argmax_invariant_processors_run_only_with_random_rows() -> None:
    invariant = Edit(same, invariant=True)
    make_sampler(3, invariant, rows=[GREEDY]).sample(torch.zeros(1, 3))
    assert invariant.seen == []
    make_sampler(3, invariant, rows=[GREEDY, SamplingParams(seed=0)]).sample(torch.zeros(2, 3))
    assert len(invariant.seen) == 1


def test_greedy_rows_ignore_random_only_steps() -> None:
    def ruin(logits: torch.Tensor) -> torch.Tensor:
        return -logits

    asks = dataclasses.replace(GREEDY, logprobs=3, logprobs_mode="processed_logprobs")
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 0.0]])
    sampler = make_sampler(3, Edit(ruin, invariant=True), rows=[asks, SamplingParams(seed=0, temperature=9.0)])
    result = sampler.sample(logits.clone())
    assert result.token_ids[0] == 1
    record = result.logprobs[0]
    assert record is not None
    assert dict(record.top) == dict(enumerate(logits[0].log_softmax(-1).tolist()))


@pytest.mark.parametrize("other", [GREEDY, SamplingParams(seed=3)])
def test_filters_do_not_change_greedy_rows(other: SamplingParams) -> None:
    logits = torch.tensor([[1.0, 1.1, 0.9], [0.0, 0.0, 0.0]])
    for mode in ("raw_logprobs", "processed_logprobs"):
        plain = SamplingParams(temperature=0, logprobs=3, logprobs_mode=mode)
        filtered = dataclasses.replace(plain, top_p=0.1, top_k=1, min_p=0.99)
        expected = make_sampler(3, rows=[plain, other]).sample(logits.clone())
        result = make_sampler(3, rows=[filtered, other]).sample(logits.clone())
        assert (result.token_ids[0], result.logprobs[0]) == (1, expected.logprobs[0])


def test_forced_token_obeys_masks() -> None:
    rows = [
        dataclasses.replace(GREEDY, allowed_token_ids=frozenset({0, 1})),
        dataclasses.replace(GREEDY, allowed_token_ids=frozenset({0, 1})),
    ]

    def set_all(logits: torch.Tensor) -> torch.Tensor:
        logits[0] = torch.tensor([1.0, 2.0, 9.0])
        return force(1, 2)(logits)

    result = make_sampler(3, shipped=Shipped(set_all), rows=rows).sample(torch.zeros(2, 3))
    assert result.token_ids[0] == 1
    [(row, fault)] = result.faults
    assert row == 1
    assert isinstance(fault, NoTokenLeftError)
    assert "Together, allowed_token_ids forbid" in str(fault)


def test_raw_logprobs_precede_all_edits() -> None:
    params = SamplingParams(seed=3, temperature=0.1, logit_bias={0: 9.0}, presence_penalty=2.0, logprobs=2)
    logits = torch.tensor([0.5, 1.0, -1.0])
    expected = logits.log_softmax(-1).tolist()
    [record] = sample_alone(logits, params, [], [1]).logprobs
    assert record is not None
    assert record.token_id == 0
    assert record.logprob == expected[0]
    assert record.rank == 2
    assert record.top == ((1, expected[1]), (0, expected[0]))


# ---- faults


def test_fault_ends_only_its_row() -> None:
    logits = torch.randn(5, 40)
    params = [SamplingParams(seed=row, top_p=0.9, logprobs=1) for row in range(5)]
    healthy = make_sampler(40, rows=params).sample(logits.clone())
    broken = dataclasses.replace(params[1], allowed_token_ids=frozenset({5}), bad_words_token_ids=((5,),))
    faulty = logits.clone()
    faulty[3, 7] = math.nan
    faulty[4, 7] = INF
    result = make_sampler(40, rows=[params[0], broken, *params[2:]]).sample(faulty)
    assert [(row, type(fault)) for row, fault in result.faults] == [
        (1, NoTokenLeftError),
        (3, NonFiniteLogitsError),
        (4, NonFiniteLogitsError),
    ]
    for row in (0, 2):
        assert result.token_ids[row] == healthy.token_ids[row]
        assert result.logprobs[row] == healthy.logprobs[row]
    assert [result.logprobs[row] for row in (1, 3, 4)] == [None, None, None]
    assert all(0 <= token < 40 for token in result.token_ids)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=0), SamplingParams(seed=0, top_k=3, top_p=0.5)])
def test_all_rows_faulty(params: SamplingParams) -> None:
    result = make_sampler(4, rows=[params] * 3).sample(torch.full((3, 4), -INF))
    assert [row for row, _ in result.faults] == [0, 1, 2]


def test_shipped_stage_reports_faults() -> None:
    fault = ProcessorFault("broke", digest="sha256:0", name="Broken", kind="exception")

    def ruin(logits: torch.Tensor) -> torch.Tensor:
        logits[0] = math.nan
        logits[1] = 0.0
        return logits

    result = make_sampler(4, shipped=Shipped(ruin, (1, fault), (0, fault)), rows=[GREEDY] * 3).sample(torch.eye(4)[:3])
    assert result.faults == [(0, fault), (1, fault)]
    assert result.token_ids[2] == 2


@pytest.mark.parametrize("rows", [None, [0, 2]])
def test_shipped_stage_identifies_faulty_processor(rows: list[int] | None) -> None:
    """The shipped stage may leave the last check of a row to step 6."""
    fault = ProcessorFault("broke", digest="sha256:0", name="Broken", kind="non_finite")

    class Asked(Shipped):
        def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: object) -> torch.Tensor:
            return self.apply(logits)

        def fault_of(self, row: int, logits: torch.Tensor) -> ProcessorFault | None:
            assert logits.isnan().any()
            return fault if row == 2 else None

    def ruin(logits: torch.Tensor) -> torch.Tensor:
        logits[0, 1] = logits[-1] = math.nan
        return logits

    sampler = make_sampler(4, shipped=Asked(ruin), rows=[GREEDY] * 3)
    faults = dict(sampler.sample(torch.zeros(3 if rows is None else 2, 4), rows).faults)
    assert faults.pop(2 if rows is None else 1) is fault
    assert {row: type(each) for row, each in faults.items()} == {0: NonFiniteLogitsError}


@pytest.mark.parametrize("value", [math.nan, INF])
def test_installed_processor_breaks_row(value: float) -> None:
    def ruin(logits: torch.Tensor) -> torch.Tensor:
        logits[0, 1] = value
        return logits

    ((row, fault),) = make_sampler(4, Edit(ruin), rows=[GREEDY] * 2).sample(torch.zeros(2, 4)).faults
    assert row == 0
    assert "one of logit_bias, a penalty, an installed batch processor exceeded" in str(fault)


@pytest.mark.parametrize("value", [-INF, math.nan, INF])
@pytest.mark.parametrize("top_k", [-1, 2])
def test_installed_processor_breaks_row_after_check(top_k: int, value: float) -> None:
    def ruin(logits: torch.Tensor) -> torch.Tensor:
        logits[1] = value
        return logits

    rows = [SamplingParams(seed=row, top_k=top_k) for row in range(3)]
    logits = torch.randn(3, 100)
    healthy = make_sampler(100, rows=rows).sample(logits.clone())
    result = make_sampler(100, Edit(ruin, invariant=True), rows=rows).sample(logits.clone())
    ((row, fault),) = result.faults
    assert row == 1
    assert str(fault).startswith("an installed batch processor, which runs after the temperature, left NaN, +inf")
    assert [result.token_ids[row] for row in (0, 2)] == [healthy.token_ids[row] for row in (0, 2)]


def test_batch_updates_reach_every_stage() -> None:
    installed, shipped = Edit(same), Shipped(same)
    sampler = make_sampler(3, installed, shipped=shipped, rows=[GREEDY])
    assert installed.updated == shipped.updated is not None
    sampler.update_state(None)
    assert installed.updated is shipped.updated is None


# ---- extreme numbers


@pytest.mark.parametrize("temperature", [1e-300, 1e-5, 100.0, 1e300])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e37])
@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (2, 1.0), (-1, 0.7), (10**30, 1e-9)])
def test_extreme_temperatures_and_logits(temperature: float, scale: float, top_k: int, top_p: float) -> None:
    logits = torch.tensor([-1.0, 2.0, 1.0, -INF, -9.0]) * scale
    params = SamplingParams(temperature=temperature, seed=4, top_k=top_k, top_p=top_p, logprobs=0)
    result = sample_alone(logits, params)
    assert result.faults == []
    assert result.token_ids[0] != 3
    if temperature <= 1e-5 or top_p < 1e-6:
        assert result.token_ids[0] == 1


def test_single_allowed_token_is_sampled() -> None:
    for params in (SamplingParams(seed=1), SamplingParams(seed=1, top_k=50), SamplingParams(seed=1, top_p=0.999)):
        logits = torch.full((1000,), -INF)
        logits[777] = -50.0
        assert sample_alone(logits, params).token_ids == [777]
