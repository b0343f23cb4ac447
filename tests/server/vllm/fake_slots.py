"""Fake of vLLM's model runner V2: slots and buffers, in plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from logitship.sampler.processors.request_view import ModelView
from logitship.server.runtime.plugin_processors import PluginProcessors
from logitship.server.runtime.seat import EngineWorker
from logitship.server.vllm.settings import VllmSettings, logger
from logitship.server.vllm.slot_seat import SlotSeat

from .fake_runner import EOS, FAULT_TOKEN, MAX_ROWS, VOCAB_SIZE, OneRank

MAX_LEN = 64


@dataclass(eq=False)
class Request:
    """A request of the fake scheduler, whose lists are the expected history."""

    req_id: str
    params: Any
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    slot: int | None = None
    prefill_len: int = 0
    computed: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def ended(self) -> bool:
        return bool(self.output) and self.output[-1] in (EOS, FAULT_TOKEN)


class Runner:
    """See the module.

    Args:
        processors: loads the processors.
        settings: the plugin's.
        ranks: the ranks; one by default.
        begins_early: with synchronous scheduling, calls begin before the logits exist.
        has_drafts: speculative decoding.
    """

    def __init__(
        self,
        processors: PluginProcessors,
        settings: Any = None,
        ranks: Any = None,
        *,
        begins_early: bool = True,
        has_drafts: bool = False,
    ) -> None:
        self.begins_early = begins_early
        self.free = list(range(MAX_ROWS))
        self.buffers = SimpleNamespace(
            device=torch.device("cpu"),
            max_num_reqs=MAX_ROWS,
            all_token_ids=SimpleNamespace(gpu=torch.zeros(MAX_ROWS, MAX_LEN, dtype=torch.int32)),
            total_len=SimpleNamespace(gpu=torch.zeros(MAX_ROWS, dtype=torch.int32)),
            prompt_len=SimpleNamespace(np=np.zeros(MAX_ROWS, dtype=np.int32)),
            prefill_len=SimpleNamespace(np=np.zeros(MAX_ROWS, dtype=np.int32)),
        )
        ranks = ranks or OneRank()
        model = ModelView(VOCAB_SIZE, frozenset({EOS}), None)
        runs = processors if ranks.is_first else None
        worker = EngineWorker(settings or VllmSettings(), model, ranks, runs, logger)
        self.seat = SlotSeat(worker, self.buffers, has_drafts=has_drafts)

    def add(self, request: Request, *, holds_embeddings: bool = False) -> None:
        slot = request.slot = self.free.pop()
        request.prefill_len, request.computed = len(request.tokens), 0
        self.buffers.prompt_len.np[slot] = len(request.prompt)
        self.buffers.prefill_len.np[slot] = request.prefill_len
        has_processors = self.seat.add_request(slot, request.req_id, request.params, holds_embeddings=holds_embeddings)
        assert has_processors is (request.params.extra_args is not None)
        self.buffers.all_token_ids.gpu[slot] = 0
        self.buffers.all_token_ids.gpu[slot, : request.prefill_len] = torch.tensor(request.tokens)
        self.buffers.total_len.gpu[slot] = request.prefill_len

    def remove(self, request: Request) -> None:
        """It finished, or it is put preempted."""
        assert request.slot is not None
        self.free.append(request.slot)
        request.slot = None

    def step(self, scheduled: list[tuple[Request, int]], logits: torch.Tensor) -> torch.Tensor:
        """Compute some tokens of some requests, and run the processors on the logits."""
        return self.sample(self.plan(scheduled), [request for request, _ in scheduled], logits)

    def sample(self, slots: list[int | None], rows: list[Request], logits: torch.Tensor) -> torch.Tensor:
        """Run the processors on the logits of a planned step."""
        padding = [0, 0]  # as vLLM pads it for a CUDA graph
        ctx = SimpleNamespace(
            idx_mapping_np=np.array(slots, dtype=np.intp),
            expanded_idx_mapping=torch.tensor(slots),
            seq_lens_upper_bound_np=np.array([request.computed for request in rows] + padding, dtype=np.int32),
        )
        self.seat.apply(logits, ctx)
        return logits

    def verify(self, scheduled: list[tuple[Request, list[int]]], logits: torch.Tensor) -> torch.Tensor:
        """Compute the last token of some requests and draft tokens behind it, and run the processors on all rows."""
        rows = []
        for request, drafts in scheduled:
            last = request.tokens[-1]
            request.computed = len(request.tokens)
            rows += [
                (request.slot, depth, request.computed - 1 + depth, token)
                for depth, token in enumerate([last, *drafts])
            ]
        slots, depths, positions, tokens = torch.tensor(rows).unbind(dim=1)
        ctx = SimpleNamespace(
            idx_mapping_np=np.array([request.slot for request, _ in scheduled], dtype=np.intp),
            expanded_idx_mapping=slots,
            expanded_local_pos=depths.int(),
            pos=positions,
            input_ids=tokens.int(),
            # With asynchronous scheduling it counts all draft tokens of the last step.
            seq_lens_upper_bound_np=np.array([request.computed + 9 for request, _ in scheduled], dtype=np.int32),
        )
        self.seat.apply(logits, ctx)
        return logits

    def plan(self, scheduled: list[tuple[Request, int]]) -> list[int | None]:
        """Plan a step, and return the slots of its rows."""
        for request, count in scheduled:
            request.computed += count
        if self.begins_early:
            self.seat.begin((cast(int, request.slot), request.computed) for request, _ in scheduled)
        return [request.slot for request, _ in scheduled]

    def commit(self, request: Request, token: int) -> None:
        """Append a sampled token."""
        assert request.slot is not None
        self.buffers.all_token_ids.gpu[request.slot, len(request.tokens)] = token
        request.output.append(token)
        self.buffers.total_len.gpu[request.slot] = len(request.tokens)
