"""A limit on the tokens between "start thinking" and "end thinking", for any model.

SGLang has a class for each model, with the ids of three tokens in it (`thinking_budget.py`). Here the request says what
thinking starts and ends with, in words of its model, and each may be several tokens long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import torch
from pydantic import ConfigDict, Field, model_validator

from logitship.builtin_processors.parts.marker import Marker
from logitship.builtin_processors.parts.row_edits import force_tokens
from logitship.builtin_processors.parts.state_history import StateHistory
from logitship.builtin_processors.parts.token_sequence import TokenSequence

from .base import BuiltinProcessor
from .params import ModelFacts, shown
from .thinking_budget import ThinkingBudgetParams


class TokenizerThinkingBudgetParams(ThinkingBudgetParams):
    """See `TokenizerThinkingBudgetLogitProcessor`."""

    model_config = ConfigDict(validate_default=True)  # what the defaults mean is up to the model

    start: Annotated[Marker, Field(default="<think>")]
    """What thinking starts with: a text, or its token ids."""
    end: Annotated[Marker, Field(default="</think>")]
    """What thinking ends with: a text, or its token ids."""
    newline: Annotated[Marker | None, Field(default="\n")]
    """What must stand before an end that is forced, most often a new line: a text, or its token ids. null: nothing."""

    @model_validator(mode="after")
    def _tell_apart(self) -> Self:
        if self.start == self.end:
            raise ValueError(f"start and end: expected two different ones, both are the tokens {shown(self.start)}")
        return self


class _State(NamedTuple):
    """What a history comes to.

    Attributes:
        opened: place in the output behind the start of the open block, negative in the prompt; None if none is open.
        start: how many tokens of the start the history ends with.
        end: of the end, behind the start of the block.
        newline: of the new line; in the output alone.
    """

    opened: int | None = None
    start: int = 0
    end: int = 0
    newline: int = 0


class MarkedThinkingBudget:
    """A request's budget, and the automaton of its markers."""

    def __init__(self, params: TokenizerThinkingBudgetParams) -> None:
        self._budget = params.thinking_budget
        self._start = TokenSequence(params.start)
        self._end = TokenSequence(params.end)
        self._newline = TokenSequence(params.newline) if params.newline is not None else None
        self._beginnings = {marker[0] for marker in (params.start, params.end, params.newline) if marker is not None}
        # What tells its states from those of another budget on the same sequence.
        self._key = f"thinking_budget:{params.start}:{params.end}:{params.newline}"

    def forced_token(self, prompt: Sequence[int], output: Sequence[int], state: dict[str, Any]) -> int | None:
        """The only token that may follow, or None if any may.

        Args:
            state: of the sequence.
        """
        if self._budget is None:
            return None
        history: StateHistory[_State] | None = state.get(self._key)
        if history is None:
            history = state[self._key] = StateHistory(self._after_prompt(prompt))
        now = history.follow(output, lambda before, token: self._after(before, token, len(history)))
        if now.opened is None or len(output) - now.opened < self._budget:
            return None
        # An end that was begun is completed, whoever began it.
        if now.end or self._newline is None or now.newline == len(self._newline):
            return self._end.token_ids[now.end]
        return self._newline.token_ids[now.newline]

    def _after_prompt(self, prompt: Sequence[int]) -> _State:
        state = _State()
        for place, token in enumerate(prompt, -len(prompt)):
            state = self._after(state, token, place)
        # A new line at the end of the prompt does not count: SGLang looks at the output alone.
        return state._replace(newline=0)

    def _after(self, state: _State, token: int, place: int) -> _State:
        """The state after `token`, which stands at `place` in the output."""
        opened, start, end, newline = state
        if not (start or end or newline) and token not in self._beginnings:
            return state  # not a copy: there is one for each token of a history
        start, end = self._start.advance(start, token), self._end.advance(end, token)
        if self._newline is not None:
            newline = self._newline.advance(newline, token)
        # Where the markers share tokens: a start inside an end that was begun is none.
        if start == len(self._start) and (opened is None or end < len(self._start)):
            opened, end = place + 1, 0
        elif end == len(self._end):
            opened = None
        return _State(opened, start, end, newline)


class TokenizerThinkingBudgetLogitProcessor(BuiltinProcessor):
    """Ends an open thinking block once `thinking_budget` tokens follow its start, on any model.

    From then on each step allows one token only: those of `newline`, unless the output ends with it, then those of
    `end`. The token's logit becomes 0, all others -inf. Where the model has begun one of the two, the rest is forced.

    Where start, end and new line are one token each, it does on every history what SGLang's
    `ThinkingBudgetLogitProcessor` does with these tokens.
    """

    name = "thinking_budget"
    Params = TokenizerThinkingBudgetParams
    example: ClassVar[Mapping[str, Any]] = {"thinking_budget": 2, "start": [7], "end": [8, 9], "newline": [6]}

    def prepare(self, params: Mapping[str, Any] | None, model: ModelFacts) -> MarkedThinkingBudget:
        """See `BuiltinProcessor.prepare`."""
        return MarkedThinkingBudget(TokenizerThinkingBudgetParams.read(params, model))

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Force the next token on each row whose budget is spent, in place."""
        forced: dict[int, int] = {}
        for row, params in enumerate(custom_param_list or ()):
            budget: MarkedThinkingBudget = self.prepared(params)
            request = params["__req__"]
            token_id = budget.forced_token(request.origin_input_ids, request.output_ids, request.state)
            if token_id is not None:
                forced[row] = token_id
        force_tokens(logits, forced)
        return logits
