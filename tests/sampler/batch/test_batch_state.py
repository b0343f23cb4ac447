"""The state of every batch processor follows the batch, in thousands of random steps compared with a reference.

The reference has no rows and no updates. It computes a request's logits from that request alone,
from scratch in each step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import inf, log
from typing import Any, NoReturn

import pytest
import torch

from logitship.builtin_processors.parameter_processors import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from logitship.client.serialization.processor_string import ProcessorString
from logitship.sampler.batch.persistent_batch import PersistentBatch, adjacent_swaps
from logitship.sampler.batch_processors.adapter import AdapterLogitsProcessor, RequestLogitsProcessor
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor, MoveDirectionality
from logitship.sampler.batch_processors.logits_processors import LogitsProcessors
from logitship.sampler.processors.executor import LoadedProcessor
from logitship.sampler.processors.local_executor import LocalExecutor
from logitship.sampler.processors.processor_groups import ProcessorUse, group_key
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.sampler.sampler import Sampler
from logitship.sampler.sampling_params import SamplingParams
from tests.helpers.random_cases import random_seeds

VOCAB = 12
CPU = torch.device("cpu")
STEPS = 750
NewRequest = Callable[..., Any]
Tokens = Sequence[int]


# --- batch processors as plugin authors write them ---


class TargetToken(LogitsProcessor):
    """The example of vLLM's documentation: a dict by row; only the target token is allowed."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.targets: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.targets.pop(row, None)
        for row, params, _, _ in batch_update.added:
            self.targets.pop(row, None)
            target = (params.extra_args or {}).get("target_token")
            if target is not None:
                self.targets[row] = target
        for source, destination, direction in batch_update.moved:
            coming, going = self.targets.pop(source, None), self.targets.pop(destination, None)
            if coming is not None:
                self.targets[destination] = coming
            if going is not None and direction is MoveDirectionality.SWAP:
                self.targets[source] = going

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        rows, targets = list(self.targets), list(self.targets.values())
        kept = logits[rows, targets].clone()
        logits[rows] = -inf
        logits[rows, targets] = kept
        return logits


class NoRepeat(LogitsProcessor):
    """Forbids the tokens of the output.

    Processes additions first, as vLLM's own processors do, and keeps a reference to each request's output list.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.outputs: dict[int, list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row, _, _, output_token_ids in batch_update.added:
            self.outputs[row] = output_token_ids
        for row in batch_update.removed:
            self.outputs.pop(row, None)
        for source, destination, direction in batch_update.moved:
            coming, going = self.outputs.pop(source), self.outputs.pop(destination, None)
            self.outputs[destination] = coming
            if direction is MoveDirectionality.SWAP:
                assert going is not None
                self.outputs[source] = going
        assert sorted(self.outputs) == list(range(batch_update.batch_size))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, output in self.outputs.items():
            logits[row, output] = -inf
        return logits


class Adapted(AdapterLogitsProcessor):
    """Callables of two and of three parameters, for the requests that ask for one."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        parameters = (params.extra_args or {}).get("callable")
        return {None: None, 2: roll_by_output, 3: roll_by_history}[parameters]


def roll_by_output(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits.roll(sum(output_token_ids))


def roll_by_history(prompt_token_ids: list[int], output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits.roll(3 * sum(prompt_token_ids) + sum(output_token_ids))


# --- shipped processors: functions of one row, called by the reference too ---

RowFunction = Callable[[torch.Tensor, int, Tokens, Tokens, int], torch.Tensor]
"""(logits of the row, parameter, prompt, output, number of earlier steps) to logits."""


def roll(row: torch.Tensor, value: int, prompt: Tokens, output: Tokens, steps: int) -> torch.Tensor:
    return row.roll(value + sum(prompt) + 3 * sum(output))


def lower(row: torch.Tensor, value: int, prompt: Tokens, output: Tokens, steps: int) -> torch.Tensor:
    return row.index_fill(0, torch.tensor([*prompt, *output], dtype=torch.int64), float(-value))


def alternate(row: torch.Tensor, value: int, prompt: Tokens, output: Tokens, steps: int) -> torch.Tensor:
    return row + value if steps % 2 else -row


class ToyExecutor(LocalExecutor):
    """Runs a `RowFunction` on each row of a group."""

    def load(self, string: ProcessorString, tenant: str = "") -> NoReturn:
        raise AssertionError("nothing is loaded here")

    def run(
        self, processor: LoadedProcessor, logits: torch.Tensor, param_list: Sequence[dict[str, Any]]
    ) -> torch.Tensor:
        rows = []
        for row, params in zip(logits, param_list, strict=True):
            request = params["__req__"]
            steps = request.state.get("steps", 0)
            request.state["steps"] = steps + 1
            rows.append(processor.instance(row, params["value"], request.origin_input_ids, request.output_ids, steps))
        return torch.stack(rows)


EXECUTOR = ToyExecutor()
SHIPPED = [
    LoadedProcessor(f"sha256:{sha256(function.__name__.encode()).hexdigest()}", function.__name__, EXECUTOR, function)
    for function in (roll, lower, alternate)
]


def new_shipped() -> ShippedProcessors:
    return ShippedProcessors(None, CPU, False, model=ModelView(VOCAB, frozenset({1}), None))


# --- the reference: the expected logits of one row, from its request alone ---


def after_min_tokens(request: Any, row: torch.Tensor, steps: int) -> torch.Tensor:
    params = request.sampling_params
    if len(request.output_token_ids) < params.min_tokens:
        for token in {*params.stop_token_ids, *params.eos_token_ids}:
            row[token] = -inf
    return row


def after_logit_bias(request: Any, row: torch.Tensor, steps: int) -> torch.Tensor:
    for token, bias in request.sampling_params.logit_bias.items():
        row[token] += bias
    return row


def after_min_p(request: Any, row: torch.Tensor, steps: int) -> torch.Tensor:
    min_p = request.sampling_params.min_p
    return row.masked_fill(row - row.max() < log(min_p), -inf) if min_p else row


def after_target_token(request: Any, row: torch.Tensor, steps: int) -> torch.Tensor:
    target = request.sampling_params.extra_args.get("target_token")
    return torch.tensor([value if target in (None, token) else -inf for token, value in enumerate(row.tolist())])


def after_no_repeat(request: Any, row: torch.Tensor, steps: int) -> torch.Tensor:
    for token in request.output_token_ids:
        row[token] = -inf
    return row


def after_adapted(request: Any, row: torch.Tensor, steps: int) -> torch.Tensor:
    parameters = request.sampling_params.extra_args.get("callable")
    prompt = request.prompt_token_ids if parameters == 3 else []
    return row.roll(3 * sum(prompt) + sum(request.output_token_ids)) if parameters else row


def after_shipped(request: Any, row: torch.Tensor, steps: int) -> torch.Tensor:
    for use in request.sampling_params.processors:
        row = use.processor.instance(
            row, use.params["value"], request.prompt_token_ids, request.output_token_ids, steps
        )
    return row


Reference = Callable[[Any, torch.Tensor, int], torch.Tensor]
"""(request, logits of its row, number of earlier steps) to logits."""

CASES: list[tuple[Callable[[], LogitsProcessor], Reference]] = [
    (lambda: MinTokensLogitsProcessor(None, CPU, False), after_min_tokens),
    (lambda: LogitBiasLogitsProcessor(None, CPU, False), after_logit_bias),
    (lambda: MinPLogitsProcessor(None, CPU, False), after_min_p),
    (lambda: TargetToken(None, CPU, False), after_target_token),
    (lambda: NoRepeat(None, CPU, False), after_no_repeat),
    (lambda: Adapted(None, CPU, False), after_adapted),
    (new_shipped, after_shipped),
]


# --- the random schedule ---


def random_params(rng: random.Random) -> SamplingParams:
    """Create a request. Each feature is in about half of the requests."""

    def tokens(most: int) -> list[int]:
        return rng.sample(range(VOCAB), rng.randint(0, most))

    extra_args: dict[str, int] = {}
    if rng.random() < 0.4:
        extra_args["target_token"] = rng.randrange(VOCAB)
    if rng.random() < 0.6:
        extra_args["callable"] = rng.choice([2, 3])
    uses = [ProcessorUse(each, {"value": rng.randrange(9)}, "r") for each in rng.sample(SHIPPED, rng.randint(0, 3))]
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7]),
        seed=rng.randrange(2**32),
        min_p=rng.choice([0.0, 0.1, 0.4]),
        min_tokens=rng.choice([0, 0, 2, 9]),
        stop_token_ids=tokens(2),
        eos_token_ids=tokens(1),
        logit_bias={token: rng.uniform(-3, 3) for token in tokens(3)},
        repetition_penalty=rng.choice([1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        bad_words_token_ids=rng.choice([[], [[rng.randrange(VOCAB), rng.randrange(VOCAB)]]]),
        extra_args=extra_args,
        processors=tuple(uses),
    )


@dataclass
class Schedule:
    """Requests that are added and removed at random."""

    rng: random.Random
    batch: PersistentBatch[Any]
    new_request: NewRequest

    def __post_init__(self) -> None:
        self.steps: dict[Any, int] = {}
        """The requests of the batch and their numbers of steps."""

    def change_batch(self) -> BatchUpdate | None:
        """Finish or abort some requests, add some, and reorder the rows."""
        rng, batch = self.rng, self.batch
        if rng.random() < 0.02:
            batch.clear()
            self.steps = {}
        for request in rng.sample(list(self.steps), min(len(self.steps), rng.choice([0, 0, 1, 1, 4]))):
            batch.remove(request)
            del self.steps[request]
        for _ in range(min(batch.max_num_seqs - len(batch), rng.choice([0, 0, 1, 1, 5]))):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))]
            request = self.new_request("r", random_params(rng), prompt)
            batch.add(request)
            self.steps[request] = 0
        self._reorder()
        return batch.commit()

    def _reorder(self) -> None:
        how = self.rng.choice(["not", "condense", "at random", "by group"])
        if how == "not":
            return
        self.batch.condense()
        rows = range(len(self.batch))
        if how == "at random" and rows:
            for _ in range(self.rng.randint(1, 4)):
                self.batch.swap(self.rng.choice(rows), self.rng.choice(rows))
        if how == "by group":
            for row_1, row_2 in adjacent_swaps([group_key(each.sampling_params) for each in self.batch.members]):
                self.batch.swap(row_1, row_2)

    def grow_outputs(self) -> None:
        """Append mostly one token to each request, sometimes several, as with accepted drafts."""
        for request in self.steps:
            self.steps[request] += 1
            count = self.rng.choice([1, 1, 1, 3])
            request.output_token_ids.extend(self.rng.randrange(VOCAB) for _ in range(count))


@pytest.fixture
def new_schedule(new_request: NewRequest) -> Callable[[int], Schedule]:
    """Factory of schedules from seeds."""

    def make(seed: int) -> Schedule:
        return Schedule(random.Random(seed), PersistentBatch([1, 3, 9][seed % 3]), new_request)

    return make


@pytest.mark.slow
@random_seeds(12, shares_fixtures=True)
def test_every_processor_state_follows_batch(seed: int, new_schedule: Callable[[int], Schedule]) -> None:
    schedule = new_schedule(seed)
    noise = torch.Generator().manual_seed(seed)
    followers = [(new(), expect) for new, expect in CASES]
    compared = 0
    for _ in range(STEPS):
        update = schedule.change_batch()
        requests = schedule.batch.members
        assert set(requests) == set(schedule.steps)
        logits = torch.randn(len(requests), VOCAB, generator=noise)
        for processor, expect in followers:
            processor.update_state(update)
            if not requests:
                continue
            got = processor.apply(logits.clone())
            expected = [
                expect(each, row.clone(), schedule.steps[each]) for each, row in zip(requests, logits, strict=True)
            ]
            assert torch.equal(got, torch.stack(expected)), type(processor).__name__
            compared += len(requests)
        schedule.grow_outputs()
    assert compared > STEPS * len(CASES) / 2


@random_seeds(3, shares_fixtures=True)
def test_sampler_is_batch_invariant(seed: int, new_schedule: Callable[[int], Schedule]) -> None:
    """A whole step with the sampler's own state: penalties, bad words, temperatures, seeds."""

    def new_sampler() -> Sampler:
        builtin = (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
        return Sampler(VOCAB, CPU, LogitsProcessors(each(None, CPU, False) for each in builtin))

    schedule = new_schedule(seed)
    noise = torch.Generator().manual_seed(seed)
    sampler = new_sampler()
    for _ in range(STEPS // 10):
        sampler.update_state(schedule.change_batch())
        requests = schedule.batch.members
        logits = torch.randn(len(requests), VOCAB, generator=noise)
        alone = []
        for request, row in zip(requests, logits, strict=True):
            other = new_sampler()
            params, prompt, output = request.sampling_params, request.prompt_token_ids, request.output_token_ids
            other.update_state(BatchUpdate(1, [], [(0, params, prompt, output)], []))
            alone += other.sample(row[None].clone()).token_ids
        assert not requests or sampler.sample(logits).token_ids == alone
        schedule.grow_outputs()
