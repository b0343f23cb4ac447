"""The engine keeps a processor's rows adjacent, and passes them as a view of the model's logits."""

from __future__ import annotations

import random
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest
import torch

from logitship.client.serialization.processor_string import ProcessorString
from logitship.sampler.batch.persistent_batch import PersistentBatch
from logitship.sampler.batch_processors.interface import BatchUpdate, MoveDirectionality
from logitship.sampler.batch_processors.logits_processors import LogitsProcessors
from logitship.sampler.processors.executor import LoadedProcessor
from logitship.sampler.processors.local_executor import LocalExecutor
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.sampler.sampler import Sampler, SamplerOutput
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.engine.engine import Engine
from logitship.server.engine.scheduler import Scheduler
from logitship.server.model.model_loader import LoadedModel
from logitship.server.model.model_runner import Chunk, ModelRunner, OutputLogits
from logitship.server.requests.messages import GenerationChunk
from logitship.server.requests.sequence import Sequence
from tests.helpers.random_cases import random_seeds

MAX_NUM_SEQS = 6
INTERLEAVED = ["A", "B", "A", "B", "", "A", "AB", "", "BA", "C", "B", "AC"]
"""Processors of successive requests: each letter is one."""


# --- processors: functions of one row ---


def roll_by_history(row: torch.Tensor, prompt: Rows[int], output: Rows[int]) -> torch.Tensor:
    return row.roll(sum(prompt) + len(output))


def negate_at_odd_lengths(row: torch.Tensor, prompt: Rows[int], output: Rows[int]) -> torch.Tensor:
    return -row if len(output) % 2 else row


def mask_output_tokens(row: torch.Tensor, prompt: Rows[int], output: Rows[int]) -> torch.Tensor:
    return row.index_fill(0, torch.tensor(output, dtype=torch.int64), -100.0)


FUNCTIONS = {"A": roll_by_history, "B": negate_at_odd_lengths, "C": mask_output_tokens}


@dataclass(frozen=True)
class Call:
    """A call of a processor: its index in the requests' lists, their ids, and the address of the rows."""

    stage: int
    rids: list[str]
    address: int


class WatchedExecutor(LocalExecutor):
    """Runs the functions, and records the calls of a step."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def load(self, string: ProcessorString, tenant: str = "") -> NoReturn:
        raise AssertionError("nothing is loaded here")

    def run(self, processor: LoadedProcessor, logits: torch.Tensor, param_list: Rows[dict[str, Any]]) -> torch.Tensor:
        views = [params["__req__"] for params in param_list]
        self.calls.append(Call(param_list[0]["stage"], [view.rid for view in views], logits.data_ptr()))
        rows = zip(logits, views, strict=True)
        return torch.stack([processor.instance(row, view.origin_input_ids, view.output_ids) for row, view in rows])


# --- an engine that is stepped manually, with its logits and rows recorded ---


class WatchedRunner(ModelRunner):
    def forward(
        self, decode: list[Chunk], prefill: list[Chunk], keep: list[int], num_complete: int
    ) -> tuple[torch.Tensor, OutputLogits]:
        self.last_logits, output = super().forward(decode, prefill, keep, num_complete)
        return self.last_logits, output


class WatchedSampler(Sampler):
    batch: PersistentBatch[Sequence]
    order: list[str]
    """Request ids of the last step, by row."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.update = batch_update
        super().update_state(batch_update)

    def sample(self, logits: torch.Tensor, rows: Rows[int] | None = None) -> SamplerOutput:
        self.order = [sequence.rid for sequence in self.batch.members]
        return super().sample(logits, rows)


class WatchedEngine:
    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self.executor = WatchedExecutor()
        self.runner = WatchedRunner(loaded.model, MAX_NUM_SEQS, max_len=64)
        device = self.runner.device
        model = ModelView(loaded.vocab_size, loaded.eos_token_ids, None)
        shipped = ShippedProcessors(None, device, False, model=model)
        self.sampler = WatchedSampler(loaded.vocab_size, device, LogitsProcessors(), shipped)
        self.sampler.batch = PersistentBatch(MAX_NUM_SEQS)
        self.running: list[Sequence] = []
        self.engine = Engine(
            self.runner,
            self.sampler,
            Scheduler(self.runner.cache, chunked_prefill_size=12),
            self.sampler.batch,
            on_finished=self.running.remove,
        )

    def add(self, rid: str, letters: str, max_tokens: int = 12) -> Sequence:
        """Add a request that is determined by its id."""
        rng = random.Random(rid)
        uses = []
        for stage, letter in enumerate(letters):
            processor = LoadedProcessor(f"sha256:{letter}", letter, self.executor, FUNCTIONS[letter])
            uses.append(ProcessorUse(processor, {"stage": stage}, rid))
        params = SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=rng.getrandbits(32), processors=tuple(uses))
        prompt = [rng.randrange(4, self._loaded.vocab_size) for _ in range(rng.randint(1, 20))]
        sequence = Sequence(rid, 0, frozenset(), prompt, params, max_tokens, self._loaded.tokenizer, ignore)
        self.running.append(sequence)
        self.engine.add([sequence])
        return sequence

    def abort(self, sequence: Sequence) -> None:
        self.engine.abort(lambda other: other is sequence)

    def step(self) -> list[Call]:
        """Compute a step. Returns its processor calls."""
        self.executor.calls = []
        self.sampler.order = []
        assert self.engine.step()
        assert all(sequence.finish_reason is None for sequence in self.running)
        return self.executor.calls

    def finish(self) -> None:
        while self.running:
            self.step()


def ignore(chunk: GenerationChunk) -> None:
    assert chunk.finish_reason is None or chunk.finish_reason.error is None


@pytest.fixture
def watched(loaded_model: LoadedModel) -> WatchedEngine:
    return WatchedEngine(loaded_model)


# --- the tests ---


@pytest.mark.thorough
@random_seeds(4)
def test_groups_are_adjacent_views_in_every_step(seed: int, loaded_model: LoadedModel) -> None:
    rng = random.Random(seed)
    watched = WatchedEngine(loaded_model)
    added: dict[str, tuple[Sequence, str]] = {}
    swaps = 0

    def are_more() -> bool:
        # In one of a thousand schedules, 40 requests make fewer swaps.
        return len(added) < (40 if swaps > 5 else 200)

    while are_more() or watched.running:
        while are_more() and (not watched.running or rng.random() < 0.5):
            rid, letters = f"{seed}-{len(added)}", INTERLEAVED[len(added) % len(INTERLEAVED)]
            added[rid] = watched.add(rid, letters, rng.randint(1, 12)), letters
        if rng.random() < 0.1:
            watched.abort(rng.choice(watched.running))
        if not watched.running:
            continue
        calls = watched.step()
        order, logits = watched.sampler.order, watched.runner.last_logits
        first_stage = [call for call in calls if call.stage == 0]
        assert sorted(rid for call in first_stage for rid in call.rids) == sorted(rid for rid in order if added[rid][1])
        assert len(first_stage) == len({added[rid][1][0] for call in first_stage for rid in call.rids})
        for call in first_stage:
            row = order.index(call.rids[0])
            assert order[row : row + len(call.rids)] == call.rids
            assert call.address == logits[row].data_ptr()
        if watched.sampler.update is not None:
            swaps += sum(how is MoveDirectionality.SWAP for _, _, how in watched.sampler.update.moved)
    assert swaps > 5

    for rid, (sequence, letters) in added.items():
        tokens = sequence.output_token_ids
        alone = watched.add(rid, letters)
        watched.finish()
        assert tokens == alone.output_token_ids[: len(tokens)]


def test_second_processors_are_adjacent_within_first_groups(watched: WatchedEngine) -> None:
    for number, letters in enumerate(["AB", "A", "AC", "AB", "AC", "AB"]):
        watched.add(str(number), letters)
    while len(watched.sampler.batch) < 6:
        watched.step()
    calls = watched.step()
    order, logits = watched.sampler.order, watched.runner.last_logits
    assert [call.stage for call in calls] == [0, 1, 1]
    assert all(call.address == logits[order.index(call.rids[0])].data_ptr() for call in calls)


def test_no_swaps_without_processors(watched: WatchedEngine) -> None:
    for number in range(12):
        watched.add(str(number), "", max_tokens=1 + number % 5)
    while watched.running:
        watched.step()
        update = watched.sampler.update
        assert update is None or all(how is MoveDirectionality.UNIDIRECTIONAL for _, _, how in update.moved)


def test_unchanged_batch_keeps_its_rows(watched: WatchedEngine) -> None:
    for number, letters in enumerate(["A", "B", "A", "", "B"]):
        watched.add(str(number), letters)
    while len(watched.sampler.batch) < 5:
        watched.step()
    order = watched.sampler.order
    watched.step()
    assert (watched.sampler.order, watched.sampler.update) == (order, None)
