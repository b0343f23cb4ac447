"""A limit on the tokens between "start thinking" and "end thinking", for any model.

SGLang has a class per model that contains the ids of three tokens (`thinking_budget.py`). Here, the request gives the
markers of its model as text or token ids, and each may be several tokens long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import ConfigDict, Field, model_validator

from logitship.builtin_processors.parts.forced_token import ForcedTokenProcessor
from logitship.builtin_processors.parts.marker import Marker
from logitship.builtin_processors.parts.state_history import StateHistory
from logitship.builtin_processors.parts.token_sequence import TokenSequence

from .params import ModelFacts, shown
from .thinking_budget import ThinkingBudgetParams


class TokenizerThinkingBudgetParams(ThinkingBudgetParams):
    """See `TokenizerThinkingBudgetLogitProcessor`."""

    model_config = ConfigDict(validate_default=True)  # the defaults are tokenized by the model

    start: Annotated[Marker, Field(default="<think>")]
    """The marker that starts thinking: a text, or its token ids."""
    end: Annotated[Marker, Field(default="</think>")]
    """The marker that ends thinking: a text, or its token ids."""
    newline: Annotated[Marker | None, Field(default="\n")]
    """The text, or its token ids, required before a forced end marker, usually a new line. null: none."""

    @model_validator(mode="after")
    def _tell_apart(self) -> Self:
        if self.start == self.end:
            raise ValueError(f"start and end: expected two different ones, both are the tokens {shown(self.start)}")
        return self


class _State(NamedTuple):
    """The automaton's state after a history.

    Attributes:
        opened: output index after the start marker of the open block, negative in the prompt; None if none is open.
        start: number of tokens of the start marker matched at the end of the history.
        end: the same of the end marker, inside the block.
        newline: the same of the new line, in the output only.
    """

    opened: int | None = None
    start: int = 0
    end: int = 0
    newline: int = 0


class MarkedThinkingBudget:
    """A request's budget, and the automaton that matches its markers."""

    def __init__(self, params: TokenizerThinkingBudgetParams) -> None:
        self._budget = params.thinking_budget
        self._start = TokenSequence(params.start)
        self._end = TokenSequence(params.end)
        self._newline = TokenSequence(params.newline) if params.newline is not None else None
        self._beginnings = {marker[0] for marker in (params.start, params.end, params.newline) if marker is not None}
        # Distinguishes its states from those of another budget on the same sequence.
        self._key = f"thinking_budget:{params.start}:{params.end}:{params.newline}"

    def forced_token(self, prompt: Sequence[int], output: Sequence[int], state: dict[str, Any]) -> int | None:
        """Return the only token allowed next, or None if all are.

        Args:
            prompt: prompt token ids.
            output: output token ids.
            state: the sequence's state.
        """
        if self._budget is None:
            return None
        history: StateHistory[_State] | None = state.get(self._key)
        if history is None:
            history = state[self._key] = StateHistory(self._after_prompt(prompt))
        now = history.follow(output, lambda before, token: self._after(before, token, len(history)))
        if now.opened is None or len(output) - now.opened < self._budget:
            return None
        # A partial end marker is completed, even if the model itself began it.
        if now.end or self._newline is None or now.newline == len(self._newline):
            return self._end.token_ids[now.end]
        return self._newline.token_ids[now.newline]

    def _after_prompt(self, prompt: Sequence[int]) -> _State:
        state = _State()
        for index, token in enumerate(prompt, -len(prompt)):
            state = self._after(state, token, index)
        # A new line at the end of the prompt does not count: SGLang only checks the output.
        return state._replace(newline=0)

    def _after(self, state: _State, token: int, index: int) -> _State:
        """Return the state after `token`, which has this index in the output."""
        opened, start, end, newline = state
        if not (start or end or newline) and token not in self._beginnings:
            return state  # not a copy, because a history holds a state per token
        start, end = self._start.advance(start, token), self._end.advance(end, token)
        if self._newline is not None:
            newline = self._newline.advance(newline, token)
        # If the markers share tokens, a start marker within a partial end marker does not count.
        if start == len(self._start) and (opened is None or end < len(self._start)):
            opened, end = index + 1, 0
        elif end == len(self._end):
            opened = None
        return _State(opened, start, end, newline)


class TokenizerThinkingBudgetLogitProcessor(ForcedTokenProcessor):
    """Ends an open thinking block once `thinking_budget` tokens follow its start, on any model.

    From then on, each step allows one token only: those of `newline`, unless the output ends with it, then those of
    `end`. The token's logit is set to 0, all others to -inf. A marker that the model has begun is continued.

    If start, end and new line are one token each, it behaves exactly like SGLang's `ThinkingBudgetLogitProcessor` with
    these tokens.
    """

    name = "thinking_budget"
    Params = TokenizerThinkingBudgetParams
    example: ClassVar[Mapping[str, Any]] = {"thinking_budget": 2, "start": [7], "end": [8, 9], "newline": [6]}

    def prepare(self, params: Mapping[str, Any] | None, model: ModelFacts) -> MarkedThinkingBudget:
        """See `BuiltinProcessor.prepare`."""
        return MarkedThinkingBudget(TokenizerThinkingBudgetParams.read(params, model))

    def forced_token(self, params: dict[str, Any]) -> int | None:
        """See `ForcedTokenProcessor.forced_token`."""
        budget: MarkedThinkingBudget = self.prepared(params)
        request = params["__req__"]
        return budget.forced_token(request.origin_input_ids, request.output_ids, request.state)
