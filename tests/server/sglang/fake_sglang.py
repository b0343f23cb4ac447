"""Fakes of SGLang's scheduler, its model runner and its greedy verification of draft tokens."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from logitship.server.runtime.draft_tree import DraftTree
from logitship.server.runtime.seat import EngineWorker
from logitship.server.runtime.tracked_request import TrackedRequest
from logitship.server.sglang.forward_step import ForwardStep
from logitship.server.sglang.generate_fields import ADMITTED
from logitship.server.sglang.sampling_ranks import SamplingRanks
from logitship.server.sglang.sglang_seat import SglangSeat, scheduled
from logitship.server.sglang.sglang_settings import SglangSettings
from logitship_sglang import logger
from tests.server.runtime.fake_engine import CHOICE, EOS, VOCAB_SIZE, BatchedEngine, FakeRequest, Job


def sampling_params(job: Job) -> Any:
    """Return a fake of SGLang's `SamplingParams`."""
    return SimpleNamespace(
        temperature=1.0,
        top_p=1.0,
        top_k=1 << 30,
        min_p=0.0,
        repetition_penalty=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        sampling_seed=None,
        max_new_tokens=job.tokens,
        min_new_tokens=0,
        stop_strs=[],
        stop_regex_strs=[],
        stop_token_ids=set(job.stop),
        ignore_eos=False,
        no_stop_trim=False,
        logit_bias=None,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        custom_params=None if job.first is None else {**job.custom_params, "__req__": object()},
    )


@dataclass(eq=False)
class FakeReq(FakeRequest):
    """Fake of SGLang's `Req`, as far as the plugin reads it.

    Attributes:
        logprobs: for each token, its reported log-probability, and the two highest with their tokens.
    """

    custom_logit_processor: str | None = None
    eos_token_ids: frozenset[int] = frozenset({EOS})
    tokenizer: Any = None
    to_finish: Any = None
    finished_reason: Any = None
    finished_len: int | None = None
    beam_group: Any = None
    logprobs: dict[int, tuple[float, list[float], list[int]]] = field(default_factory=dict)

    @property
    def origin_input_ids(self) -> array[int]:
        return array("q", self.prompt)

    @property
    def output_ids(self) -> array[int]:
        return array("q", self.output)

    @property
    def visible(self) -> list[int]:
        return self.output[: self.finished_len]

    @property
    def has_ended(self) -> bool:
        return self.finished_reason is not None or super().has_ended

    def finished(self) -> bool:
        return self.has_ended

    def take(self, count: int) -> None:
        super().take(count)
        if self.to_finish is not None:
            self.finished_reason, self.to_finish = self.to_finish, None


class Sglang(BatchedEngine):
    """SGLang's scheduler, which drops a token in flight when it retracts a request."""

    settings_class = SglangSettings
    ranks_class = SamplingRanks
    logger = logger
    drops_tokens = True
    seat: SglangSeat

    def _start(self, worker: EngineWorker[Any]) -> None:
        self.seat = SglangSeat(worker)

    def request(self, job: Job) -> FakeReq:
        string = None if job.first is None else f"{ADMITTED}:{job.string}"
        return FakeReq(job, sampling_params(job), custom_logit_processor=string)

    def is_failed(self, request: FakeRequest) -> bool:
        assert isinstance(request, FakeReq)
        return request.finished_reason is not None

    def end(self) -> None:
        self.seat.drop_finished()

    def _begin(self, plan: Mapping[FakeReq, int]) -> None:
        rows = tracked(plan)
        if self.begins_early and rows:
            self.seat.begin(rows, forward_step(plan))

    def _apply(self, logits: torch.Tensor, rows: Sequence[FakeReq]) -> None:
        requests = tracked(rows)
        if not requests:
            self.seat.plain_step()
            return
        with self.seat.sampling(forward_step(rows)):
            self.seat.apply(logits, requests, 1)
        tokens, logprobs = logits.argmax(-1), logits.log_softmax(-1)
        values, indices = logprobs.topk(2)
        output = SimpleNamespace(
            next_token_logprobs=logprobs.amax(-1),
            next_token_top_logprobs_val=list(values),
            next_token_top_logprobs_idx=list(indices),
            next_token_token_ids_logprobs_val=None,
        )
        self.seat.sampled(tokens, output, {})
        columns = (output.next_token_logprobs, output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx)
        for req, *reported in zip(rows, *columns, strict=True):
            own, highest, top = [each.tolist() for each in reported]
            req.logprobs[len(req.sampled)] = own, highest, top


class SglangOverlap(Sglang):
    """SGLang's scheduler with overlap scheduling."""

    is_async = True
    begins_early = False


class SglangGrammar(SglangOverlap):
    """The same with a grammar in the batch: a step is sampled after the one before was processed, and may end there."""

    is_delayed = True
    begins_early = True


class SglangDrafts(Sglang):
    """SGLang's scheduler with draft tokens, in trees."""

    draft_trees = True
    begins_early = False

    def sample(self, *rows: FakeRequest) -> dict[FakeRequest, list[int]]:
        requests = tracked(rows)
        if any(req.missing or not req.output for req in rows) or not requests:
            return super().sample(*rows)
        drafts = [self._draft(req.job, req.output) for req in rows]
        width = len(drafts[0][0])
        trees = [tree_of(row * width, *draft) for row, draft in enumerate(drafts)]
        logits = torch.zeros(len(rows) * width, VOCAB_SIZE)
        logits[:, CHOICE] = 1.0
        self.seat.apply_to_drafts(logits, requests, trees)
        choices = logits.argmax(-1).view(-1, width).tolist()
        paths = [walk(*draft, each) for draft, each in zip(drafts, choices, strict=True)]
        accepted = [[row * width + node for node in path] + [-1] * width for row, path in enumerate(paths)]
        self.seat.take_accepted(logits, requests, accepted)
        return {req: [each[node] for node in path] for req, path, each in zip(rows, paths, choices, strict=True)}


def tracked(rows: Any) -> dict[int, TrackedRequest]:
    """Return the requests with processors, by row."""
    return {row: scheduled(req) for row, req in enumerate(rows) if req.custom_logit_processor}


def forward_step(rows: Any) -> ForwardStep:
    """Return a step of some rows."""
    last = [(req.prompt + req.sampled)[-1] for req in rows]
    is_decode = SimpleNamespace(is_extend=lambda: False)
    lengths = torch.tensor([req.computed for req in rows])
    return ForwardStep(SimpleNamespace(seq_lens_cpu=lengths, input_ids=torch.tensor(last), forward_mode=is_decode))


def tree_of(first_row: int, tokens: Sequence[int], parents: Sequence[int]) -> DraftTree:
    """Return a tree as SGLang links it."""
    nodes = range(len(tokens))
    children = [[child for child in nodes if parents[child] == node] for node in nodes]
    siblings = [-1] * len(tokens)
    for each in children:
        for child, sibling in pairwise(each):
            siblings[child] = sibling
    return DraftTree.from_links(first_row, tokens, [each[0] if each else -1 for each in children], siblings)


def walk(tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> list[int]:
    """Return the nodes that a greedy verification accepts, after the root."""
    path = [0]
    while True:
        same = [n for n in range(len(tokens)) if parents[n] == path[-1] and tokens[n] == choices[path[-1]]]
        if not same:
            return path
        path.append(same[0])
