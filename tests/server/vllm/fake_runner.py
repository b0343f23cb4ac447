"""Fake of vLLM's scheduler and of its model runner V1, which schedules at random, as vLLM may."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from logitship.server.vllm.batch_seat import BatchSeat

VOCAB_SIZE = 64
EOS = 1
FAULT_TOKEN = 63
MAX_ROWS = 6


class Direction(Enum):
    """vLLM's own `MoveDirectionality`: another class than logitship's."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


class OneRank:
    is_first = True
    size = 1

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
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_computed_tokens(self) -> int:
        return self.computed

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

    def step(self, batch: BatchSeat) -> None:
        """Schedule and compute a step."""
        update = self._reschedule()
        self.input_batch.req_ids = [record.req_id for record in self.rows]
        self.input_batch.req_output_token_ids = [record.output_token_ids for record in self.rows]
        self.update_states(batch, update, SimpleNamespace(num_scheduled_tokens=self._plan()))
        if self.is_async:  # the tokens of the step before, filled in at the last moment
            for record in self.rows:
                record.output_token_ids[:] = record.sampled
        self._sample(batch)

    def _plan(self) -> dict[str, int]:
        """Return how many tokens of each request are computed in the step: the rest, or a chunk of it."""
        missing = {
            record.req_id: record.num_prompt_tokens + len(record.sampled) - record.computed for record in self.rows
        }
        return {req_id: self.random.randint(1, count) if count > 1 else count for req_id, count in missing.items()}

    def update_states(self, batch: BatchSeat, update: Any, scheduler_output: Any) -> None:
        """Call the plugin, which finds the plan as an argument of this method, and set the mask."""
        batch.update_state(update)
        if not self.is_async:
            batch.begin()
        for row, record in enumerate(self.rows):
            record.computed += scheduler_output.num_scheduled_tokens[record.req_id]
            self.discard_request_mask.np[row] = record.computed < record.num_prompt_tokens + len(record.sampled)

    def _sample(self, batch: BatchSeat) -> None:
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
    """Logits that depend on the whole history, without the EOS token."""
    history = str((record.req_id, *record.sampled))
    generator = torch.Generator().manual_seed(zlib.crc32(history.encode()))
    logits = torch.randn(VOCAB_SIZE, generator=generator)
    logits[EOS] = -torch.inf
    return logits


def alone(record: Record) -> list[int]:
    """Tokens sampled for a request without processors."""
    copy = Record(record.req_id, record.sampling_params, record.prompt_token_ids)
    while not copy.ended:
        copy.sampled.append(int(model(copy).argmax()))
    return copy.sampled


def add_to_row_0(runner: Runner, batch: BatchSeat, record: Record) -> torch.Tensor:
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


def run(runner: Runner, batch: BatchSeat, *records: Record) -> dict[str, list[int]]:
    runner.waiting += records
    wanted = {record.req_id for record in records}
    for _ in range(5000):
        if wanted <= runner.finished.keys():
            runner.step(batch)  # so that the last ones are dropped
            return runner.finished
        runner.step(batch)
    raise AssertionError("the requests did not finish")
