"""Fakes of vLLM's scheduler and of its model runners V1 and V2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from logitship.server.runtime.seat import EngineWorker
from logitship.server.vllm.batch_requests import BatchRequests
from logitship.server.vllm.batch_seat import BatchSeat
from logitship.server.vllm.row_deferral import RowDeferral
from logitship.server.vllm.settings import VllmSettings, logger
from logitship.server.vllm.slot_seat import SlotSeat
from logitship.server.vllm.vllm_seat import VllmSeat
from tests.server.runtime.fake_engine import CHOICE, FAULT_TOKEN, MAX_ROWS, VOCAB_SIZE, BatchedEngine, FakeRequest, Job

MAX_LEN = 64


class Direction(Enum):
    """vLLM's own `MoveDirectionality`: another class than logitship's."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


def fake_params(extra_args: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Return a fake of vLLM's `SamplingParams`."""
    defaults: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "seed": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop": [],
        "stop_token_ids": [],
        "ignore_eos": False,
        "include_stop_str_in_output": False,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": None,
        "bad_words_token_ids": None,
        "structured_outputs": None,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
    }
    return SimpleNamespace(**defaults | fields, extra_args=extra_args)


def params_of(job: Job) -> Any:
    """Return the parameters of a request that the front end has admitted."""
    extra_args = {"custom_logit_processor": job.string, "custom_params": job.custom_params}
    ends = {"stop_token_ids": [FAULT_TOKEN, *job.stop], "stop": ["x"] if job.stops_at is not None else []}
    return fake_params(None if job.first is None else extra_args, max_tokens=job.tokens, **ends)


@dataclass(eq=False)
class Record(FakeRequest):
    """A request with vLLM's `CachedRequestState`.

    Attributes:
        output_token_ids: vLLM's list of its output, which ends in placeholders for tokens in flight.
        scheduled: number of its tokens that the step computes.
    """

    prompt_token_ids: list[int] | None = None
    prompt_is_token_ids: list[bool] | None = None
    output_token_ids: list[int] = field(default_factory=list)
    scheduled: int = 0

    @property
    def req_id(self) -> str:
        return self.rid

    @property
    def num_prompt_tokens(self) -> int:
        return self.job.prompt

    @property
    def num_tokens(self) -> int:
        return self.job.prompt + len(self.output_token_ids)

    @property
    def num_computed_tokens(self) -> int:
        return self.computed - self.scheduled


@dataclass(eq=False)
class SchedulerRequest:
    """Fake of the scheduler's `Request`.

    Attributes:
        record: the model runner's record.
        num_output_placeholders: tokens in flight, of which one is of this step.
        next_decode_eligible_step: first step that may compute it, if it has not been preempted.
    """

    record: Record
    num_output_placeholders: int = 0
    next_decode_eligible_step: int = 0

    @property
    def num_computed_tokens(self) -> int:
        return self.record.computed

    @num_computed_tokens.setter
    def num_computed_tokens(self, number: int) -> None:
        assert number == self.record.computed - 1
        assert self.record.missing == 0
        self.record.computed = number


class Scheduler:
    """Fake of vLLM's class of this name."""

    __module__ = "vllm.v1.core.sched.scheduler"

    def __init__(self) -> None:
        self.requests: dict[str, SchedulerRequest] = {}
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec())])
        self.connector = self.ec_connector = self.aux_output_connector = self.lora_config = None


class FullAttentionSpec:
    """Fake of vLLM's class of this name."""


class Vllm(BatchedEngine):
    """A model runner of vLLM.

    Attributes:
        sent_steps: the steps of the receipts that were sent with outputs, by request id and length of the whole output.
    """

    settings_class = VllmSettings
    logger = logger
    seat: VllmSeat

    def _make(self, settings: dict[str, Any]) -> None:
        self.sent_steps: dict[tuple[str, int], int] = {}
        super()._make({"enable_custom_logit_processor": True} | settings)

    def _append(self, tokens: Mapping[FakeRequest, list[int]]) -> dict[FakeRequest, int]:
        endings = self.seat.take_endings()
        for request, new in tokens.items():
            attached = endings[request.rid].to_json(new, FAULT_TOKEN) if request.rid in endings else {}
            for length, (receipt,) in enumerate(attached.get("receipts", ()), len(request.sampled) + 1):
                self.sent_steps[request.rid, length] = receipt["steps"]
        return super()._append(tokens)


class VllmV1(Vllm):
    """vLLM's model runner V1, whose rows stay in place, and move into gaps.

    Attributes:
        scheduler: the scheduler, in the same process. This class is its own `EngineCore`.
    """

    defers = True
    seat: BatchSeat

    def _start(self, worker: EngineWorker[Any]) -> None:
        self.requests: dict[str, Record] = {}
        self.rows: list[Record] = []
        self.scheduler = Scheduler()
        self.num_prompt_logprobs: dict[str, int] = {}
        self.input_batch = SimpleNamespace(req_ids=[], req_output_token_ids=[], generators={})
        self.discard_request_mask = SimpleNamespace(np=np.zeros(MAX_ROWS, dtype=bool))
        self.seat = BatchSeat(worker, BatchRequests(self), RowDeferral(self, self))

    def request(self, job: Job) -> Record:
        return Record(job, params_of(job), prompt_token_ids=[7] * job.prompt)

    def add(self, request: Record) -> None:
        if self.requests.get(request.rid) is not request:
            self.requests[request.rid] = request
            self.scheduler.requests[request.rid] = SchedulerRequest(request)

    def may_run(self, request: Record) -> bool:
        """Return False for a request that sits out. When it has been preempted, vLLM begins to compute it again."""
        return not request.computed or not self.scheduler.requests[request.rid].next_decode_eligible_step

    def finish(self, request: Record) -> None:
        if self.requests.get(request.rid) is request:
            del self.requests[request.rid]
            del self.scheduler.requests[request.rid]

    def end(self) -> None:
        super().end()
        while self.runtime._allowances:  # calls of requests that have ended
            self.runtime.begin_step()

    def _begin(self, plan: Mapping[Record, int]) -> None:
        for record, count in plan.items():
            record.scheduled = count
        update = self._update_rows(plan)
        self.input_batch.req_ids = [record.req_id for record in self.rows]
        self.input_batch.req_output_token_ids = [record.output_token_ids for record in self.rows]
        self._update_states(update, SimpleNamespace(num_scheduled_tokens={each.rid: n for each, n in plan.items()}))

    def _update_states(self, update: Any, scheduler_output: Any) -> None:
        """Call the plugin, which finds the plan as an argument of this method."""
        self.seat.update_state(update)
        if self.begins_early:
            self.seat.begin()

    def _update_rows(self, plan: Mapping[Record, int]) -> Any:
        """Remove and add requests, close the gaps, and swap two rows."""
        rows = [each if each in plan else None for each in self.rows]
        added = []
        for record in [each for each in plan if each not in self.rows]:
            if self.is_async:
                record.output_token_ids = list(record.sampled)
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
        if len(rows) > 1 and self.random.random() < 0.3:
            a, b = self.random.sample(range(len(rows)), 2)
            rows[a], rows[b] = rows[b], rows[a]
            moved.append((a, b, Direction.SWAP))
        self.rows = [record for record in rows if record is not None]
        if not (removed or added or moved):
            return None
        return SimpleNamespace(batch_size=len(self.rows), removed=removed, added=added, moved=moved)

    def _apply(self, logits: torch.Tensor, rows: Sequence[Record]) -> None:
        for row, record in enumerate(self.rows):
            record.output_token_ids[:] = record.sampled  # filled in at the last moment
            self.discard_request_mask.np[row] = record not in rows or record.missing > 0
        order = [self.rows.index(record) for record in rows]
        ordered = torch.zeros(len(self.rows), VOCAB_SIZE)
        ordered[order] = logits
        self.seat.apply(ordered)
        for row, record in enumerate(self.rows):
            assert self.discard_request_mask.np[row] == (record not in rows or record.missing > 0)
        logits[:] = ordered[order]

    def commit(self, request: FakeRequest, tokens: list[int]) -> None:
        assert isinstance(request, Record)
        super().commit(request, tokens)
        request.output_token_ids += [-1] * len(tokens) if self.is_async else tokens


class VllmV1Async(VllmV1):
    """vLLM's model runner V1 with asynchronous scheduling."""

    is_async = True
    begins_early = False


@dataclass(eq=False)
class SlotRequest(FakeRequest):
    """A request in a slot, or preempted."""

    slot: int | None = None
    prefill_len: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.sampled


class VllmV2(Vllm):
    """vLLM's model runner V2: slots and buffers.

    Attributes:
        holds_embeddings: the next prompts do.
    """

    has_drafts = False
    seat: SlotSeat

    def _start(self, worker: EngineWorker[Any]) -> None:
        self.holds_embeddings = False
        self.free = list(range(MAX_ROWS))
        self._finished: set[str] = set()
        self.buffers = SimpleNamespace(
            device=torch.device("cpu"),
            max_num_reqs=MAX_ROWS,
            all_token_ids=SimpleNamespace(gpu=torch.zeros(MAX_ROWS, MAX_LEN, dtype=torch.int32)),
            total_len=SimpleNamespace(gpu=torch.zeros(MAX_ROWS, dtype=torch.int32)),
            prompt_len=SimpleNamespace(np=np.zeros(MAX_ROWS, dtype=np.int32)),
            prefill_len=SimpleNamespace(np=np.zeros(MAX_ROWS, dtype=np.int32)),
        )
        self.seat = SlotSeat(worker, self.buffers, has_drafts=self.has_drafts)

    def request(self, job: Job) -> SlotRequest:
        return SlotRequest(job, params_of(job))

    def add(self, request: SlotRequest) -> None:
        slot = request.slot = self.free.pop()
        request.prefill_len = len(request.tokens)
        self.buffers.prompt_len.np[slot] = request.job.prompt
        self.buffers.prefill_len.np[slot] = request.prefill_len
        params = request.sampling_params
        has_processors = self.seat.add_request(slot, request.rid, params, holds_embeddings=self.holds_embeddings)
        assert has_processors is (params.extra_args is not None)
        self.buffers.all_token_ids.gpu[slot] = 0
        self.buffers.all_token_ids.gpu[slot, : request.prefill_len] = torch.tensor(request.tokens)
        self.buffers.total_len.gpu[slot] = request.prefill_len

    def remove(self, request: SlotRequest) -> None:
        if request.slot is not None:
            self.free.append(request.slot)
            request.slot = None

    def finish(self, request: SlotRequest) -> None:
        self.remove(request)
        self._finished.add(request.rid)

    def commit(self, request: FakeRequest, tokens: list[int]) -> None:
        assert isinstance(request, SlotRequest)
        assert request.slot is not None
        for token in tokens:
            self.buffers.all_token_ids.gpu[request.slot, len(request.tokens)] = token
            super().commit(request, [token])
        self.buffers.total_len.gpu[request.slot] = len(request.tokens)

    def _begin(self, plan: Mapping[SlotRequest, int]) -> None:
        self.seat.remove_finished(self._finished)
        self._finished = set()
        if self.begins_early and plan:
            self.seat.begin((int(request.slot or 0), request.computed) for request in plan)

    def _apply(self, logits: torch.Tensor, rows: Sequence[SlotRequest]) -> None:
        slots = [request.slot for request in rows]
        padding = [0, 0]  # as vLLM pads it for a CUDA graph
        ctx = SimpleNamespace(
            idx_mapping_np=np.array(slots, dtype=np.intp),
            expanded_idx_mapping=torch.tensor(slots),
            seq_lens_upper_bound_np=np.array([request.computed for request in rows] + padding, dtype=np.int32),
        )
        self.seat.apply(logits, ctx)


class VllmV2Async(VllmV2):
    """vLLM's model runner V2 with asynchronous scheduling."""

    is_async = True
    begins_early = False


class VllmV2Drafts(VllmV2):
    """vLLM's model runner V2 with draft tokens, in chains. It may reject the right ones, too."""

    has_drafts = True
    begins_early = False

    def sample(self, *rows: FakeRequest) -> dict[FakeRequest, list[int]]:
        drafts = [self._chain(request) for request in rows]
        logits = torch.zeros(sum(map(len, drafts)), VOCAB_SIZE)
        logits[:, CHOICE] = 1.0
        self.verify(rows, drafts, logits)
        tokens, first = {}, 0
        for request, chain in zip(rows, drafts, strict=True):
            choices = logits[first : first + len(chain)].argmax(-1).tolist()
            first += len(chain)
            if request.missing == 0:
                tokens[request] = self._accepted(request, chain[1:], choices)
        return tokens

    def verify(self, rows: Sequence[Any], drafts: Sequence[list[int]], logits: torch.Tensor) -> None:
        """Run the processors on the rows of the last token of requests and of the draft tokens behind it."""
        columns = [
            (request.slot, depth, request.computed - 1 + depth, token)
            for request, chain in zip(rows, drafts, strict=True)
            for depth, token in enumerate(chain)
        ]
        slots, depths, positions, tokens = torch.tensor(columns).unbind(dim=1)
        ctx = SimpleNamespace(
            idx_mapping_np=np.array([request.slot for request in rows], dtype=np.intp),
            expanded_idx_mapping=slots,
            expanded_local_pos=depths.int(),
            pos=positions,
            input_ids=tokens.int(),
            # With asynchronous scheduling it counts all draft tokens of the last step.
            seq_lens_upper_bound_np=np.array([request.computed + 9 for request in rows], dtype=np.int32),
        )
        self.seat.apply(logits, ctx)

    def _chain(self, request: Any) -> list[int]:
        """Return the last token of a request with draft tokens. Behind a prompt, these are padding."""
        if not request.output:
            return [7] * self.random.randint(1, 3)
        chain, _ = self._draft(request.job, request.output, self.random.randint(2, 4))
        is_random = self.draft_tokens is None
        return [*chain[:-1], -1] if is_random and self.random.random() < 0.2 else chain

    def _accepted(self, request: Any, drafts: list[int], choices: list[int]) -> list[int]:
        """Return the accepted draft tokens and the one that vLLM samples behind them."""
        accepted = 0
        while accepted < len(drafts) and self._accepts(request, drafts[accepted], choices[accepted]):
            accepted += 1
        return choices[: accepted + 1]

    def _accepts(self, request: Any, draft: int, choice: int) -> bool:
        is_prefill = len(request.tokens) == request.prefill_len
        return draft == choice and not is_prefill and (self.draft_tokens is not None or self.random.random() < 0.8)
