"""A limit on the tokens between a model's "start thinking" and "end thinking" tokens.

The parameter, the class names and the behaviour on every history are SGLang's. SGLang reads the whole history in each
step; here a step reads the tokens that are new. For other models there is `any_model_thinking_budget.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from logitship.builtin_processors.parts.row_edits import force_tokens
from logitship.client.serialization.shipped_names import SGLANG_MODULE

from .base import BuiltinProcessor
from .params import Expects, ModelFacts, ProcessorParams


class ThinkingBudgetParams(ProcessorParams):
    """See `ThinkingBudgetLogitProcessor`."""

    thinking_budget: Annotated[
        Annotated[int, Field(ge=0)] | None, Expects("an integer, 0 or greater, or null for no limit")
    ]
    """Most tokens after the start of thinking. null: no limit."""


class ThinkingBudgetLogitProcessor(BuiltinProcessor):
    """Ends an open thinking block once `thinking_budget` tokens follow its start token.

    From then on each step allows one token only: a new line, then, after a new line, the end of thinking. The token's
    logit becomes 0, all others -inf. A subclass says which tokens these are for its model.
    """

    _pickles_as: ClassVar[tuple[str, str]] = (SGLANG_MODULE, "ThinkingBudgetLogitProcessor")

    THINKING_START_TOKEN_ID: ClassVar[int]
    THINKING_END_TOKEN_ID: ClassVar[int]
    NEW_LINE_TOKEN_ID: ClassVar[int]

    Params = ThinkingBudgetParams
    example: ClassVar[Mapping[str, Any]] = {"thinking_budget": 3}

    @classmethod
    def check_model(cls, model: ModelFacts) -> None:
        """Refuse a model that has not the tokens that this class forces."""
        for attribute in ("THINKING_START_TOKEN_ID", "THINKING_END_TOKEN_ID", "NEW_LINE_TOKEN_ID"):
            token_id = getattr(cls, attribute, None)
            if token_id is None:
                raise ValueError(f"{cls.__name__} has no {attribute}: use the subclass for the model")
            if not 0 <= token_id < model.vocab_size:
                raise ValueError(
                    f"{cls.__name__} is not for this model: its {attribute} {token_id} is outside the vocabulary "
                    f"(0 to {model.vocab_size - 1})"
                )

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Force the next token on each row whose budget is spent, in place."""
        key = f"thinking_budget:{self.THINKING_START_TOKEN_ID}:{self.THINKING_END_TOKEN_ID}"
        forced = {
            row: token_id
            for row, params in enumerate(custom_param_list or ())
            if (token_id := self._forced_token(params, key)) is not None
        }
        force_tokens(logits, forced)
        return logits

    def _forced_token(self, params: Mapping[str, Any], key: str) -> int | None:
        """The only token that may follow the row's history, or None if any may.

        Args:
            key: of what is kept in the sequence's state.
        """
        budget = params.get("thinking_budget")
        # Admission lets none but None through here; a subclass that a request ships is not checked there.
        if not isinstance(budget, int) or budget < 0:
            return None
        request = params["__req__"]
        prompt, output, state = request.origin_input_ids, request.output_ids, request.state
        read, last, start = self._read(prompt, output, *state.get(key, _UNREAD))
        # A tuple, so that copies of the state never share what one of them changes.
        state[key] = read, last, start
        if start is None or read - start <= budget:
            return None
        # A new line at the end of the prompt does not count: SGLang looks at the output alone.
        return self.THINKING_END_TOKEN_ID if last == self.NEW_LINE_TOKEN_ID else self.NEW_LINE_TOKEN_ID

    def _read(
        self, prompt: Sequence[int], output: Sequence[int], read: int, last: int | None, start: int | None
    ) -> tuple[int, int | None, int | None]:
        """Read the new tokens of prompt + output.

        Args:
            read: how many tokens were read before.
            last: the last one of them that was in the output.
            start: where the thinking block started that was open behind them, or None if none was.

        Returns:
            The same three, of all tokens.
        """
        num_prompt = len(prompt)
        length = num_prompt + len(output)
        # Tokens were taken back: what was found may be among them. That others came in their place is noticed if the
        # last one differs, as with `StateHistory`.
        if read > length or (read > num_prompt and last != output[read - num_prompt - 1]):
            read, start = 0, None
        # From the end, since the last border decides; most of the time it is the token before the new ones.
        for position in range(length - 1, read - 1, -1):
            token = prompt[position] if position < num_prompt else output[position - num_prompt]
            if token == self.THINKING_START_TOKEN_ID:
                start = position
                break
            if token == self.THINKING_END_TOKEN_ID:
                start = None
                break
        return length, output[-1] if output else None, start


_UNREAD = (0, None, None)


class Qwen3ThinkingBudgetLogitProcessor(ThinkingBudgetLogitProcessor):
    """Thinking budget for Qwen3: `<think>`, `</think>`."""

    _pickles_as: ClassVar[tuple[str, str]] = (SGLANG_MODULE, "Qwen3ThinkingBudgetLogitProcessor")

    name = "qwen3_thinking_budget"
    THINKING_START_TOKEN_ID = 151667
    THINKING_END_TOKEN_ID = 151668
    NEW_LINE_TOKEN_ID = 198


class DeepSeekR1ThinkingBudgetLogitProcessor(ThinkingBudgetLogitProcessor):
    """Thinking budget for DeepSeek-R1: `<think>`, `</think>`."""

    _pickles_as: ClassVar[tuple[str, str]] = (SGLANG_MODULE, "DeepSeekR1ThinkingBudgetLogitProcessor")

    name = "deepseek_r1_thinking_budget"
    THINKING_START_TOKEN_ID = 128798
    THINKING_END_TOKEN_ID = 128799
    NEW_LINE_TOKEN_ID = 201


class Glm4MoeThinkingBudgetLogitProcessor(ThinkingBudgetLogitProcessor):
    """Thinking budget for GLM-4.5 and GLM-4.6, text and vision: `<think>`, `</think>`."""

    _pickles_as: ClassVar[tuple[str, str]] = (SGLANG_MODULE, "Glm4MoeThinkingBudgetLogitProcessor")

    name = "glm4_moe_thinking_budget"
    THINKING_START_TOKEN_ID = 151350
    THINKING_END_TOKEN_ID = 151351
    NEW_LINE_TOKEN_ID = 198


class InklingThinkingBudgetLogitProcessor(ThinkingBudgetLogitProcessor):
    """Thinking budget for Inkling."""

    _pickles_as: ClassVar[tuple[str, str]] = (SGLANG_MODULE, "InklingThinkingBudgetLogitProcessor")

    name = "inkling_thinking_budget"
    THINKING_START_TOKEN_ID = 200008
    THINKING_END_TOKEN_ID = 200010
    NEW_LINE_TOKEN_ID = 198
