"""Fake of SGLang's scheduler and model runner, which schedules at random, as SGLang may."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from logitship.server.runtime.tracked_request import TrackedRequest
from logitship.server.sglang.forward_step import ForwardStep
from logitship.server.sglang.sglang_seat import SglangSeat, scheduled

VOCAB_SIZE = 64
EOS = 1
MAX_ROWS = 6


@dataclass(eq=False)
class FakeReq:
    """Fake of SGLang's `Req`, as far as the plugin reads it."""

    rid: str
    origin_input_ids: array[int]
    sampling_params: Any
    custom_logit_processor: str | None = None
    output_ids: array[int] = field(default_factory=lambda: array("q"))
    eos_token_ids: frozenset[int] = frozenset({EOS})
    tokenizer: Any = None
    to_finish: Any = None
    finished_reason: Any = None
    finished_len: int | None = None
    stops_at: int | None = None
    """Number of output tokens after which a stop string ends it, which only the scheduler finds."""
    is_retracted: bool = False
    beam_group: Any = None
    computed: int = 0
    """Tokens that the model has read."""
    in_flight: int = 0
    """Steps whose tokens the scheduler has not processed."""
    logprobs: list[tuple[float, list[float], list[int]]] = field(default_factory=list)
    """For each output token, its log-probability, and the two highest with their tokens."""

    def finished(self) -> bool:
        return self.finished_reason is not None

    @property
    def length(self) -> int:
        return len(self.origin_input_ids) + len(self.output_ids) + self.in_flight

    @property
    def visible(self) -> list[int]:
        """The output that the client gets."""
        return list(self.output_ids[: self.finished_len])

    def accept(self, token: int) -> None:
        """Append a token, and finish if it was the last one: SGLang's `update_finish_state`."""
        self.output_ids.append(token)
        if self.to_finish is not None:
            self.finished_reason, self.to_finish = self.to_finish, None
        elif token in {EOS, *(self.sampling_params.stop_token_ids or ())}:
            self.finished_reason = "stop"
        elif len(self.output_ids) >= self.sampling_params.max_new_tokens:
            self.finished_reason = "length"
        elif self.stops_at is not None and len(self.output_ids) >= self.stops_at:
            self.finished_reason = "stop"


@dataclass(eq=False)
class FakeSampled:
    """A computed step: the requests of its rows, and the tokens of those whose prompt is complete, once sampled."""

    reqs: list[FakeReq]
    complete: list[bool]
    tokens: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    output: Any = None


class FakeScheduler:
    """Fake of SGLang's `Scheduler` with its model runner.

    Each step prefills, with parts of prompts, or decodes; sometimes it retracts a request first, which drops its token
    that is in flight.

    Args:
        overlap: a step is computed before the tokens of the one before are processed.
        delayed: its tokens are sampled after that, as with a grammar in the batch.
    """

    def __init__(self, seed: int, processors: SglangSeat, *, overlap: bool, delayed: bool = False) -> None:
        self._random = random.Random(seed)
        self._processors = processors
        self._overlap = overlap
        self._delayed = delayed
        self._waiting: list[FakeReq] = []
        self._running: list[FakeReq] = []
        self._results: list[FakeSampled] = []
        self._last_tokens: dict[FakeReq, int] = {}
        self.num_dropped = 0

    def run(self, *requests: FakeReq) -> None:
        """Run requests that arrive at random to their ends."""
        arriving = list(requests)
        while arriving or self._waiting or self._running or self._results:
            if arriving and self._random.random() < 0.5:
                self._waiting.append(arriving.pop(0))
            self._step()

    def _step(self) -> None:
        self._running = [req for req in self._running if not req.finished()]
        self._retract()
        batch = self._next_batch()
        sample = self._compute(batch) if batch else _noop
        if not self._delayed:
            sample()
        while self._results and (len(self._results) > 1 or not self._overlap or not batch):
            self._process(self._results.pop(0))
        if self._delayed:
            sample()

    def _retract(self) -> None:
        if self._running and self._random.random() < 0.15:
            req = self._running.pop(self._random.randrange(len(self._running)))
            req.is_retracted = True
            self.num_dropped += req.in_flight
            req.in_flight = req.computed = 0
            self._waiting.insert(0, req)

    def _next_batch(self) -> list[FakeReq]:
        self._waiting = [req for req in self._waiting if not req.finished()]
        free = MAX_ROWS - len(self._running)
        if self._waiting and free and self._random.random() < 0.5:
            batch = self._waiting[: self._random.randint(1, free)]
            if any(req in result.reqs for result in self._results for req in batch):
                return []  # SGLang processes a retracted request's last step before it computes its prompt again
            for req in batch:
                req.is_retracted = False
                req.computed = self._random.randint(req.computed + 1, req.length)
            complete = [req for req in batch if req.computed == req.length]
            self._waiting = [req for req in self._waiting if req not in complete]
            self._running += complete
            return batch
        decoding = [req for req in self._running if req.computed]
        self._random.shuffle(decoding)
        for req in decoding:
            req.computed = req.length
        return decoding

    def _compute(self, batch: list[FakeReq]) -> Callable[[], None]:
        """Compute the logits of a step, and return the function that samples its tokens."""
        lengths = [req.computed for req in batch]
        last = [self._last_tokens.get(req, -1) for req in batch]
        forward = SimpleNamespace(
            seq_lens_cpu=torch.tensor(lengths),
            input_ids=torch.tensor(last),
            forward_mode=SimpleNamespace(is_extend=lambda: False),
        )
        result = FakeSampled(batch, [req.computed == req.length for req in batch])
        rows = {row: scheduled(req) for row, req in enumerate(batch) if req.custom_logit_processor}
        if rows and (self._delayed or not self._overlap) and all(result.complete):
            self._processors.begin(rows, ForwardStep(forward))
        self._results.append(result)
        return lambda: self._sample(result, rows, ForwardStep(forward))

    def _sample(self, result: FakeSampled, rows: dict[int, TrackedRequest], step: ForwardStep) -> None:
        logits = torch.full((len(result.reqs), VOCAB_SIZE), 0.0)
        logits[:, 5] = 1.0
        if rows:
            with self._processors.sampling(step):
                self._processors.apply(logits, rows, 1)
        result.tokens = logits.argmax(-1)
        logprobs = logits.log_softmax(-1)
        values, indices = logprobs.topk(2)
        result.output = SimpleNamespace(
            next_token_logprobs=logprobs[torch.arange(len(logits)), result.tokens],
            next_token_top_logprobs_val=list(values),
            next_token_top_logprobs_idx=list(indices),
            next_token_token_ids_logprobs_val=None,
        )
        if rows:
            self._processors.sampled(result.tokens, result.output)
        for req, is_complete, token in zip(result.reqs, result.complete, result.tokens.tolist(), strict=True):
            if is_complete:
                req.in_flight += 1
                self._last_tokens[req] = token

    def _process(self, result: FakeSampled) -> None:
        output = result.output
        logprobs = zip(
            output.next_token_logprobs.tolist(),
            [values.tolist() for values in output.next_token_top_logprobs_val],
            [indices.tolist() for indices in output.next_token_top_logprobs_idx],
            strict=True,
        )
        rows = zip(result.reqs, result.tokens.tolist(), logprobs, result.complete, strict=True)
        for req, token, row_logprobs, complete in rows:
            if not complete or req.finished() or req.is_retracted:
                continue
            req.in_flight -= 1
            req.accept(token)
            req.logprobs.append(row_logprobs)


def _noop() -> None:
    pass
