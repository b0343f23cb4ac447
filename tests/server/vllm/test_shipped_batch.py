"""The plugin on a fake of vLLM's model runner V1 that schedules at random, as vLLM may."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from logitship.sampler.processors.request_view import ModelView
from logitship.server.vllm.batch_requests import BatchRequests
from logitship.server.vllm.plugin_processors import PluginProcessors, for_execution
from logitship.server.vllm.settings import PluginSettings
from logitship.server.vllm.shipped_batch import ShippedBatch

VOCAB_SIZE = 64
EOS = 1
FAULT_TOKEN = 63
MAX_ROWS = 6
MakeParams = Callable[..., Any]


class Direction(Enum):
    """vLLM's own `MoveDirectionality`: another class than logitship's."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


class OneRank:
    is_first = True

    def broadcast(self, logits: torch.Tensor, rows: list[int]) -> None:
        """Do nothing: there is no other rank."""


@dataclass(eq=False)
class Record:
    """Fake of vLLM's `CachedRequestState`, followed by the scheduler's state."""

    req_id: str
    sampling_params: Any
    prompt_token_ids: list[int] | None
    output_token_ids: list[int] = field(default_factory=list)
    prompt_is_token_ids: list[bool] | None = None

    sampled: list[int] = field(default_factory=list)
    computed: int = 0
    late: int = 0
    """Steps computed after the end."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids or ())

    @property
    def ended(self) -> bool:
        params = self.sampling_params
        return bool(self.sampled) and (
            len(self.sampled) == params.max_tokens or self.sampled[-1] in {EOS, *params.stop_token_ids}
        )


class Runner:
    """Fake of vLLM's scheduler, and of its model runner V1 as far as the plugin reads it.

    Args:
        is_async: a step is scheduled before the tokens of the one before are known.
    """

    def __init__(self, seed: int, is_async: bool) -> None:
        self.random = random.Random(seed)
        self.is_async = is_async
        self.requests: dict[str, Record] = {}
        self.rows: list[Record] = []
        self.waiting: list[Record] = []
        self.input_batch = SimpleNamespace(req_ids=[], req_output_token_ids=[])
        self.discard_request_mask = SimpleNamespace(np=np.zeros(MAX_ROWS, dtype=bool))
        self.finished: dict[str, list[int]] = {}

    def step(self, batch: ShippedBatch) -> None:
        """Schedule and compute a step."""
        update = self._reschedule()
        self.input_batch.req_ids = [record.req_id for record in self.rows]
        self.input_batch.req_output_token_ids = [record.output_token_ids for record in self.rows]
        batch.update_state(update)
        for row, record in enumerate(self.rows):
            tokens = record.num_prompt_tokens + len(record.sampled)
            missing = tokens - record.computed
            record.computed += self.random.randint(1, missing) if missing > 1 else missing
            self.discard_request_mask.np[row] = record.computed < tokens
        if self.is_async:  # the tokens of the step before, filled in at the last moment
            for record in self.rows:
                record.output_token_ids[:] = record.sampled
        self._sample(batch)

    def _sample(self, batch: ShippedBatch) -> None:
        logits = torch.stack([model(record) for record in self.rows]) if self.rows else torch.zeros(0, VOCAB_SIZE)
        before = logits.clone()
        batch.apply(logits)
        for row, record in enumerate(self.rows):
            if record.sampling_params.extra_args is None:
                assert torch.equal(logits[row], before[row])
            if self.discard_request_mask.np[row]:
                continue
            assert logits[row].isfinite().any()
            if record.ended:
                record.late += 1
                continue
            record.sampled.append(int(logits[row].argmax()))
            record.output_token_ids.append(-1 if self.is_async else record.sampled[-1])

    def _reschedule(self) -> Any:
        """Finish, preempt and admit requests, and close the gaps."""
        gone = []
        for row, record in enumerate(self.rows):
            if record.ended and record.late == self.is_async:
                self.finished[record.req_id] = record.sampled
                del self.requests[record.req_id]
                gone.append(row)
            elif not record.ended and self.random.random() < 0.1:
                if self.random.random() < 0.5:
                    record.computed = 0  # preempted, not only left out of one step
                self.waiting.append(record)
                gone.append(row)
        rows: list[Record | None] = [None if row in gone else record for row, record in enumerate(self.rows)]
        added = []
        while self.waiting and len(rows) - rows.count(None) < MAX_ROWS and self.random.random() < 0.7:
            record = self.waiting.pop(0)
            if self.is_async and record.sampled:
                record.output_token_ids = list(record.sampled)
            self.requests[record.req_id] = record
            row = rows.index(None) if None in rows else len(rows)
            rows[row : row + 1] = [record]
            added.append((row, record.sampling_params, record.prompt_token_ids, record.output_token_ids))
        removed = [row for row, record in enumerate(rows) if record is None]
        moved: list[tuple[int, int, Direction]] = []
        while None in rows:
            last = rows.pop()
            if last is not None:
                target = rows.index(None)
                rows[target] = last
                moved.append((len(rows), target, Direction.UNIDIRECTIONAL))
        self.rows = [record for record in rows if record is not None]
        if len(self.rows) > 1 and self.random.random() < 0.3:
            a, b = self.random.sample(range(len(self.rows)), 2)
            self.rows[a], self.rows[b] = self.rows[b], self.rows[a]
            moved.append((a, b, Direction.SWAP))
        if not (removed or added or moved):
            return None
        return SimpleNamespace(batch_size=len(self.rows), removed=removed, added=added, moved=moved)


def model(record: Record) -> torch.Tensor:
    """Logits that depend on the whole history, without the end token."""
    generator = torch.Generator().manual_seed(hash((record.req_id, *record.sampled)) % (1 << 31))
    logits = torch.randn(VOCAB_SIZE, generator=generator)
    logits[EOS] = -torch.inf
    return logits


def alone(record: Record) -> list[int]:
    """Tokens sampled for a request without processors."""
    copy = Record(record.req_id, record.sampling_params, record.prompt_token_ids)
    while not copy.ended:
        copy.sampled.append(int(model(copy).argmax()))
    return copy.sampled


@pytest.fixture
def processors(settings: PluginSettings, model: ModelView) -> PluginProcessors:
    return for_execution(settings, model, MAX_ROWS)


MakeBatch = Callable[[Runner], ShippedBatch]


@pytest.fixture
def make_batch(model: ModelView, processors: PluginProcessors) -> MakeBatch:
    def make(runner: Runner) -> ShippedBatch:
        return ShippedBatch(model, torch.device("cpu"), processors, BatchRequests(runner), FAULT_TOKEN, OneRank())

    return make


@pytest.fixture
def request_of(processor_string: str, vllm_params: MakeParams) -> Callable[..., Record]:
    """Factory of requests with `ChecksHistory`.

    One that fails gets its own class, because without a sandbox a fault fails the whole call.
    """

    def make(req_id: str, prompt: int = 3, tokens: int = 8, **params: Any) -> Record:
        custom_params = {"first": 2, "prompt": prompt, **params}
        string = json.loads(processor_string)
        if params.get("fails_at") is not None:
            string["source"] += f"# {req_id}"
        extra_args = {"custom_logit_processor": json.dumps(string), "custom_params": custom_params}
        sampling = vllm_params(extra_args, max_tokens=tokens, stop_token_ids=[FAULT_TOKEN])
        return Record(req_id, sampling, [7] * prompt)

    return make


def run(runner: Runner, batch: ShippedBatch, *records: Record) -> dict[str, list[int]]:
    runner.waiting += records
    wanted = {record.req_id for record in records}
    for _ in range(5000):
        if wanted <= runner.finished.keys():
            runner.step(batch)  # so that the last ones are dropped
            return runner.finished
        runner.step(batch)
    raise AssertionError("the requests did not finish")


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_histories_are_exact_in_every_schedule(
    seed: int,
    is_async: bool,
    make_batch: MakeBatch,
    request_of: Callable[..., Record],
    vllm_params: MakeParams,
    processors: PluginProcessors,
) -> None:
    """Covers prompt chunks, preempted requests, moves, placeholders, one step too many, and faults."""
    rng = random.Random(seed)
    runner = Runner(seed, is_async)
    records: list[Record] = []
    expected: dict[str, list[int]] = {}
    for number in range(24):
        req_id, prompt, tokens, first = str(number), rng.randint(1, 9), rng.randint(1, 20), rng.randint(2, 40)
        kind = rng.choice(["plain", "runs", "runs", "fails"])
        if kind == "plain":
            sampling = vllm_params(max_tokens=tokens, stop_token_ids=[FAULT_TOKEN])
            records.append(Record(req_id, sampling, [7] * prompt))
            expected[req_id] = alone(records[-1])
        else:
            fails_at = rng.randrange(tokens) if kind == "fails" else None
            records.append(request_of(req_id, prompt, tokens, first=first, fails_at=fails_at))
            forced = list(range(first, first + tokens))
            expected[req_id] = forced if fails_at is None else [*forced[:fails_at], FAULT_TOKEN]
    batch = make_batch(runner)
    assert run(runner, batch, *records) == expected
    assert processors.in_use == 0
    assert not batch._kept


@pytest.mark.parametrize(("tokens", "stop"), [(4, []), (8, [5])], ids=["its_length", "a_stop_token"])
def test_processor_is_not_called_after_the_end(
    make_batch: MakeBatch,
    request_of: Callable[..., Record],
    tokens: int,
    stop: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The engine computes one step more than it needs, before it knows the token that ended the request."""
    runner = Runner(0, is_async=True)
    record = request_of("x", tokens=tokens, fails_at=4)
    record.sampling_params.stop_token_ids += stop
    assert run(runner, make_batch(runner), record)["x"] == [2, 3, 4, 5]
    assert not caplog.messages


def test_fault_is_logged_once(
    make_batch: MakeBatch, request_of: Callable[..., Record], caplog: pytest.LogCaptureFixture
) -> None:
    runner = Runner(0, is_async=True)
    with caplog.at_level(logging.ERROR, "vllm.logitship"):
        finished = run(runner, make_batch(runner), request_of("r-1", fails_at=2))
    assert finished["r-1"] == [2, 3, FAULT_TOKEN]
    (message,) = caplog.messages
    assert message.startswith(
        "request r-1 ends with stop_reason 63: processor ChecksHistory raised RuntimeError: requested"
    )
    assert "Traceback" in message


def test_request_id_is_reused(make_batch: MakeBatch, request_of: Callable[..., Record]) -> None:
    """The second is a new request: vLLM may replace the first in the same step."""
    runner = Runner(0, is_async=False)
    batch = make_batch(runner)
    assert run(runner, batch, request_of("x"))["x"] == list(range(2, 10))
    runner.finished.clear()
    assert run(runner, batch, request_of("x", prompt=5))["x"] == list(range(2, 10))


def add_to_row_0(runner: Runner, batch: ShippedBatch, record: Record) -> torch.Tensor:
    """Add a request with a computed prompt to row 0, and return its logits, which are all 0."""
    runner.requests[record.req_id] = record
    runner.input_batch.req_ids = [record.req_id]
    runner.input_batch.req_output_token_ids = [record.output_token_ids]
    added = [(0, record.sampling_params, record.prompt_token_ids, record.output_token_ids)]
    batch.update_state(SimpleNamespace(batch_size=1, removed=[], added=added, moved=[]))
    return torch.zeros(1, VOCAB_SIZE)


def is_ended(logits: torch.Tensor) -> bool:
    """Return True if only the fault token can be sampled."""
    return logits[0].isfinite().nonzero().tolist() == [[FAULT_TOKEN]]


def test_placeholder_ends_the_request(
    make_batch: MakeBatch, request_of: Callable[..., Record], caplog: pytest.LogCaptureFixture
) -> None:
    runner = Runner(0, is_async=True)
    batch = make_batch(runner)
    record = request_of("x")
    batch.apply(add_to_row_0(runner, batch, record))
    record.output_token_ids.append(-1)
    logits = torch.zeros(1, VOCAB_SIZE)
    batch.update_state(None)
    batch.apply(logits)
    assert is_ended(logits)
    assert "--logits-processors" in caplog.text


def test_shortened_output_ends_the_request(make_batch: MakeBatch, request_of: Callable[..., Record]) -> None:
    runner = Runner(0, is_async=False)
    batch = make_batch(runner)
    record = request_of("x")
    batch.apply(add_to_row_0(runner, batch, record))
    record.output_token_ids.append(2)
    batch.apply(torch.zeros(1, VOCAB_SIZE))
    record.output_token_ids.clear()
    logits = torch.zeros(1, VOCAB_SIZE)
    batch.apply(logits)
    assert is_ended(logits)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_token_ids": None},
        {"prompt_is_token_ids": [True, False, True]},
    ],
)
def test_prompt_embeddings_end_the_request(
    make_batch: MakeBatch, request_of: Callable[..., Record], change: dict[str, Any]
) -> None:
    runner = Runner(0, is_async=False)
    batch = make_batch(runner)
    record = request_of("x")
    for name, value in change.items():
        setattr(record, name, value)
    logits = add_to_row_0(runner, batch, record)
    batch.apply(logits)
    assert is_ended(logits)


def test_load_error_ends_the_request(
    make_batch: MakeBatch, request_of: Callable[..., Record], caplog: pytest.LogCaptureFixture
) -> None:
    runner = Runner(0, is_async=False)
    batch = make_batch(runner)
    record = request_of("x")
    record.sampling_params.extra_args = {"custom_logit_processor": '{"name": "nothing"}'}
    logits = add_to_row_0(runner, batch, record)
    batch.apply(logits)
    assert is_ended(logits)
    assert "no processor is installed or registered as 'nothing'" in caplog.text


def test_processor_cannot_force_the_fault_token(make_batch: MakeBatch, request_of: Callable[..., Record]) -> None:
    """Neither the model nor a processor may choose it; without another token, the request ends."""
    runner = Runner(0, is_async=False)
    batch = make_batch(runner)
    logits = add_to_row_0(runner, batch, request_of("x", first=FAULT_TOKEN))
    batch.apply(logits)
    assert is_ended(logits)


@pytest.mark.parametrize("is_hard", [True, False])
def test_forced_token_obeys_hard_masks(
    make_batch: MakeBatch, request_of: Callable[..., Record], is_hard: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The mask of vLLM was applied before."""
    runner = Runner(0, is_async=False)
    batch = make_batch(runner)
    record = request_of("x", first=4)
    record.sampling_params.allowed_token_ids = [5, 6] if is_hard else None
    logits = add_to_row_0(runner, batch, record)
    logits[0, :5] = -torch.inf
    batch.apply(logits)
    assert is_ended(logits) == is_hard
    assert (logits[0, 4] == 0) == (not is_hard)
    assert ("left no token of those that allowed_token_ids" in caplog.text) == is_hard


def test_internal_error_ends_requests_and_is_not_raised(
    make_batch: MakeBatch, request_of: Callable[..., Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(0, is_async=False)
    batch = make_batch(runner)
    logits = add_to_row_0(runner, batch, request_of("x"))

    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("logitship.server.vllm.shipped_batch.ShippedProcessors.apply", fail)
    batch.apply(logits)
    assert is_ended(logits)


def test_untrackable_request_ends_and_others_run(
    make_batch: MakeBatch,
    request_of: Callable[..., Record],
    vllm_params: MakeParams,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The rows after it and the moves of that step are applied."""
    request_of_list = BatchRequests.request_of

    def fail_for_one(self: BatchRequests, output_token_ids: list[int]) -> Any:
        record = request_of_list(self, output_token_ids)
        if record.req_id == "broken":
            raise LookupError("a bug")
        return record

    monkeypatch.setattr(BatchRequests, "request_of", fail_for_one)
    for seed in range(8):
        runner = Runner(seed, is_async=bool(seed % 2))
        plain = Record("plain", vllm_params(max_tokens=8, stop_token_ids=[FAULT_TOKEN]), [7] * 3)
        records = [request_of("broken"), plain, request_of("x", first=20), request_of("y", first=30)]
        assert run(runner, make_batch(runner), *records) == {
            "broken": [FAULT_TOKEN],
            "plain": alone(plain),
            "x": list(range(20, 28)),
            "y": list(range(30, 38)),
        }
    assert "LookupError: a bug" in caplog.text
    assert "request (unknown) ends with stop_reason 63" in caplog.text


def test_missing_discard_mask_ends_the_request(
    make_batch: MakeBatch, request_of: Callable[..., Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(0, is_async=False)
    batch = make_batch(runner)
    logits = add_to_row_0(runner, batch, request_of("x"))
    del runner.discard_request_mask
    batch.apply(logits)
    assert is_ended(logits)


class Rank:
    """One of two ranks: `broadcast` copies the rows of the first to the other."""

    def __init__(self, is_first: bool, written: list[torch.Tensor]) -> None:
        self.is_first = is_first
        self._written = written

    def broadcast(self, logits: torch.Tensor, rows: list[int]) -> None:
        if self.is_first:
            self._written.append(logits[rows].clone())
        else:
            logits[rows] = self._written.pop(0)


def test_other_ranks_receive_the_rows_of_the_first(
    model: ModelView, processors: PluginProcessors, request_of: Callable[..., Record]
) -> None:
    written: list[torch.Tensor] = []
    results = []
    for is_first in (True, False):
        runner = Runner(0, is_async=False)
        batch = ShippedBatch(
            model,
            torch.device("cpu"),
            processors if is_first else None,
            BatchRequests(runner),
            FAULT_TOKEN,
            Rank(is_first, written),
        )
        record = request_of("x", fails_at=1)
        steps = [add_to_row_0(runner, batch, record)]
        batch.apply(steps[0])
        record.output_token_ids.append(int(steps[0].argmax()))
        steps.append(torch.zeros(1, VOCAB_SIZE))
        batch.update_state(None)
        batch.apply(steps[1])
        results.append(torch.cat(steps))
    assert torch.equal(*results)
    assert results[0].argmax(dim=-1).tolist() == [2, FAULT_TOKEN]
    assert not written
