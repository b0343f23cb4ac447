"""`thinking_token_budget`: limits the tokens of a request's thinking.

Forces the same tokens as vLLM 0.32.0 without speculative decoding (its `ThinkingBudgetStateHolder`), except that:

- all tokens of a start marker in the prompt are counted (vLLM counts from its second token on, and allows more);
- an end marker without a start marker is ignored (vLLM then misses the next end marker, and forces another one into the
  answer);
- an end marker that the model has begun is continued, and markers may begin in the prompt and end in the output (as in
  vLLM's model runner V2; its V1 writes the whole end marker, and treats prompt and output separately);
- forcing respects masks: if a mask forbids the forced token, no token is left, and the request ends with
  `NoTokenLeftError` (vLLM overwrites the mask with 1e9).
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
from logitship.sampler.allowed_tokens import AllowedTokens
from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.batch_processors.logits_processors import BatchRows, ForcingLogitsProcessor, rows_of_drafts
from logitship.sampler.device_tensor import TokenPositions, copies_to
from logitship.sampler.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Thinking:
    """The automaton's state after a history.

    Attributes:
        tokens: number of tokens since the start marker; None if it is not thinking.
        start: number of tokens of the start marker matched at the end of the history, outside thinking.
        end: the same of the forced end marker, inside thinking.
        natural_end: the same of the end marker that the model writes by itself.
    """

    tokens: int | None = None
    start: int = 0
    end: int = 0
    natural_end: int = 0


_ANSWERING = Thinking()


@dataclass(frozen=True)
class ReasoningMarkers:
    """Markers of thinking: the start, the end to force, and the end that the model writes by itself."""

    start: TokenSequence
    end: TokenSequence
    natural_end: TokenSequence

    @classmethod
    def of(cls, reasoning_config: Any) -> Self:
        """Return the markers of a `ReasoningConfig`."""
        return cls(
            TokenSequence(reasoning_config.reasoning_start_token_ids),
            TokenSequence(reasoning_config.reasoning_end_token_ids),
            TokenSequence(reasoning_config.natural_reasoning_end_token_ids),
        )

    def opened_in(self, prompt: Sequence[int]) -> int | None:
        """Return the index after the start marker of the thinking that a prompt leaves open, or None."""
        opened = self.start.end_of_last_in(prompt)
        closed = max(self.end.end_of_last_in(prompt), self.natural_end.end_of_last_in(prompt))
        return opened if opened - len(self.start) >= closed else None


class ThinkingBudget:
    """The automaton of a budget.

    A start marker begins thinking; inside thinking, it has no effect. Every token after the marker counts, including
    those of an incomplete end marker.

    Args:
        budget: maximum tokens between a start marker and the forced end marker. In a prompt, the last start marker
            counts.
        markers: the model's markers.
    """

    def __init__(self, budget: int, markers: ReasoningMarkers) -> None:
        self._budget = budget
        self._markers = markers

    def after_prompt(self, prompt: Sequence[int]) -> Thinking:
        """Return the initial state: thinking, if no end marker follows the prompt's last start marker."""
        start, end, natural_end = self._markers.start, self._markers.end, self._markers.natural_end
        opened = self._markers.opened_in(prompt)
        if opened is None:
            closed = max(end.end_of_last_in(prompt), natural_end.end_of_last_in(prompt))
            return Thinking(start=start.begun_in(prompt, closed))
        return Thinking(
            len(prompt) - opened, end=end.begun_in(prompt, opened), natural_end=natural_end.begun_in(prompt, opened)
        )

    def step(self, state: Thinking, token_id: int) -> Thinking:
        """Return the state after another token."""
        markers = self._markers
        if state.tokens is None:
            start = markers.start.advance(state.start, token_id)
            return Thinking(0) if start == len(markers.start) else Thinking(start=start)
        end = markers.end.advance(state.end, token_id)
        natural_end = markers.natural_end.advance(state.natural_end, token_id)
        # The natural end may be part of the end being forced, which is completed nevertheless.
        is_forcing = self._is_spent(state) and end > 0
        if end == len(markers.end) or (natural_end == len(markers.natural_end) and not is_forcing):
            return _ANSWERING
        return Thinking(state.tokens + 1, end=end, natural_end=natural_end)

    def forced(self, state: Thinking) -> int | None:
        """Return the only token allowed next, or None if all are.

        An end marker that the model has begun is continued.
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
    """Forces the end marker, token by token, in rows that have used up their `thinking_token_budget`.

    Args:
        vllm_config: its `reasoning_config` has the markers.
        device: the device of the logits.
        is_pin_memory: whether to use pinned memory.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._markers = ReasoningMarkers.of(vllm_config.reasoning_config)
        self._to_device = copies_to(device, is_pin_memory)
        self._rows: BatchRows[_Row] = BatchRows(self._new_row)
        self._forced: dict[int, int] = {}
        self._positions: TokenPositions | None = None

    def is_argmax_invariant(self) -> bool:
        """False: it determines the most likely token."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch, and the new tokens of rows with a budget."""
        self._rows.update(batch_update)
        forced = {row: token for row, state in self._rows.items() if (token := state.forced()) is not None}
        if forced != self._forced:
            self._forced = forced
            self._positions = self._on_device(forced) if forced else None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Forbid all but the forced token in rows that have one, in place: float32 [rows, vocab].

        The token keeps its logit, so a forbidden token remains forbidden.
        """
        if self._positions is not None:
            _keep_only(logits, self._positions)
        return logits

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        """See `SpeculativeLogitsProcessor`. A draft that differs from a forced token is rejected."""
        rows = enumerate(rows_of_drafts(num_draft_tokens))
        forced = {index: self._forced[row] for index, row in rows if row in self._forced}
        if forced:
            _keep_only(logits, self._on_device(forced))
        return logits

    def restrict(self, row: int, allowed: AllowedTokens) -> None:
        """See `DecidesTokens`."""
        state = self._rows.get(row)
        forced = None if state is None else state.forced()
        if forced is not None:
            allowed.keep([forced])

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
