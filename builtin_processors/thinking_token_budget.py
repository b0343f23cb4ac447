"""`thinking_token_budget`: how many tokens a request may think before it must come to its answer.

What is forced is what vLLM 0.32.0 forces without speculative decoding (its `ThinkingBudgetStateHolder`), but that:

- a start marker of several tokens in the prompt counts in full (vLLM counts from its second token on, and allows more);
- an end that no start came before changes nothing (vLLM then overlooks the next end, and forces another one into the
  answer);
- an end that the model has begun by itself is continued, and markers may begin in the prompt and end in the output (so
  in vLLM's model runner V2; its V1 writes the whole end after the beginning, and looks at prompt and output apart);
- forcing obeys masks: where one forbids the token to force, the row has none left, and its request ends with
  `NoTokenLeftError` (vLLM writes 1e9 over the mask).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from logitship.builtin_processors.parts.state_history import StateHistory
from logitship.builtin_processors.parts.token_sequence import TokenSequence
from logitship.sampler.batch_processors.batch_rows import BatchRows, rows_of_drafts
from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.batch_processors.logits_processors import ForcingLogitsProcessor
from logitship.sampler.device_tensor import TokenPositions, copies_to
from logitship.sampler.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Thinking:
    """Where a sequence stands.

    Attributes:
        tokens: tokens since the start marker; None: it is not thinking.
        start: how many tokens of the start marker it ends with, outside the thinking.
        end: the same of the end that is forced, inside.
        natural_end: the same of the end that the model writes by itself.
    """

    tokens: int | None = None
    start: int = 0
    end: int = 0
    natural_end: int = 0


_ANSWERING = Thinking()


@dataclass(frozen=True)
class ReasoningMarkers:
    """What begins the thinking, what is forced to end it, and what ends it besides."""

    start: TokenSequence
    end: TokenSequence
    natural_end: TokenSequence

    @classmethod
    def of(cls, reasoning_config: Any) -> Self:
        """The markers of a `ReasoningConfig`."""
        return cls(
            TokenSequence(reasoning_config.reasoning_start_token_ids),
            TokenSequence(reasoning_config.reasoning_end_token_ids),
            TokenSequence(reasoning_config.natural_reasoning_end_token_ids),
        )

    def opened_in(self, prompt: Sequence[int]) -> int | None:
        """Index of the token behind the start marker of the thinking that a prompt begins and does not end, or None."""
        opened = self.start.end_of_last_in(prompt)
        closed = max(self.end.end_of_last_in(prompt), self.natural_end.end_of_last_in(prompt))
        return opened if opened - len(self.start) >= closed else None


class ThinkingBudget:
    """The automaton of one budget.

    A start marker begins the thinking, one inside of it changes nothing. Every token behind the marker counts, also
    what the model writes of an end that it does not complete.

    Args:
        budget: most tokens between a start marker and the end that is forced. Each start begins anew.
    """

    def __init__(self, budget: int, markers: ReasoningMarkers) -> None:
        self._budget = budget
        self._markers = markers

    def after_prompt(self, prompt: Sequence[int]) -> Thinking:
        """The first state: thinking, if the last start marker in the prompt has no end behind it."""
        start, end, natural_end = self._markers.start, self._markers.end, self._markers.natural_end
        opened = self._markers.opened_in(prompt)
        if opened is None:
            closed = max(end.end_of_last_in(prompt), natural_end.end_of_last_in(prompt))
            return Thinking(start=start.begun_in(prompt, closed))
        return Thinking(
            len(prompt) - opened, end=end.begun_in(prompt, opened), natural_end=natural_end.begun_in(prompt, opened)
        )

    def step(self, state: Thinking, token_id: int) -> Thinking:
        """The state after one more token."""
        markers = self._markers
        if state.tokens is None:
            start = markers.start.advance(state.start, token_id)
            return Thinking(0) if start == len(markers.start) else Thinking(start=start)
        end = markers.end.advance(state.end, token_id)
        natural_end = markers.natural_end.advance(state.natural_end, token_id)
        # A natural end may also stand inside the end that is being forced: all of that is written nevertheless.
        is_forcing = self._is_spent(state) and end > 0
        if end == len(markers.end) or (natural_end == len(markers.natural_end) and not is_forcing):
            return _ANSWERING
        return Thinking(state.tokens + 1, end=end, natural_end=natural_end)

    def forced(self, state: Thinking) -> int | None:
        """The only token that may follow; None: any may.

        An end that the model has begun by itself is continued.
        """
        return self._markers.end.token_ids[state.end] if self._is_spent(state) else None

    def _is_spent(self, state: Thinking) -> bool:
        return state.tokens is not None and state.tokens >= self._budget


@dataclass(frozen=True, eq=False)
class _Row:
    budget: ThinkingBudget
    history: StateHistory[Thinking]
    output_token_ids: list[int]

    def forced(self) -> int | None:
        return self.budget.forced(self.history.follow(self.output_token_ids, self.budget.step))


class ThinkingTokenBudgetLogitsProcessor(ForcingLogitsProcessor):
    """Ends the thinking of the rows that have spent their `thinking_token_budget`, token by token of the end marker.

    Args:
        vllm_config: its `reasoning_config` has the markers.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._markers = ReasoningMarkers.of(vllm_config.reasoning_config)
        self._to_device = copies_to(device, is_pin_memory)
        self._rows: BatchRows[_Row] = BatchRows(self._new_row)
        self._forced: dict[int, int] = {}
        self._positions: TokenPositions | None = None

    def is_argmax_invariant(self) -> bool:
        """False: it says which token is the most likely one."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch, and the new tokens of the rows that have a budget."""
        self._rows.update(batch_update)
        forced = {row: token for row, state in self._rows.items() if (token := state.forced()) is not None}
        if forced != self._forced:
            self._forced = forced
            self._positions = self._on_device(forced) if forced else None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leave the rows that are forced only that one token, in place: float32 [rows, vocab].

        It keeps its logit: a token that is forbidden stays so.
        """
        if self._positions is not None:
            _keep_only(logits, self._positions)
        return logits

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        """See `SpeculativeLogitsProcessor`. A draft that goes on where an end is forced is rejected there."""
        rows = enumerate(rows_of_drafts(num_draft_tokens))
        forced = {place: self._forced[row] for place, row in rows if row in self._forced}
        if forced:
            _keep_only(logits, self._on_device(forced))
        return logits

    def _on_device(self, forced: dict[int, int]) -> TokenPositions:
        rows, tokens = np.array([*forced.items()], dtype=np.int64).T.copy()
        return self._to_device(rows), self._to_device(tokens)

    def _new_row(
        self, params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
    ) -> _Row | None:
        if params.thinking_token_budget is None:
            return None
        budget = ThinkingBudget(params.thinking_token_budget, self._markers)
        return _Row(budget, StateHistory(budget.after_prompt(prompt_token_ids or [])), output_token_ids)


def _keep_only(logits: torch.Tensor, positions: TokenPositions) -> None:
    kept = logits[positions]
    logits.index_fill_(0, positions[0], -math.inf)
    logits.index_put_(positions, kept)
