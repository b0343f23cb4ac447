"""A limit on the tokens between a model's "start thinking" and "end thinking" tokens.

The parameter, the class names and the behavior are those of SGLang. SGLang reads the whole history in each step; here,
a step only reads the new tokens. For other models, see `any_model_thinking_budget.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from logitship.builtin_processors.parts.forced_token import ForcedTokenProcessor
from logitship.client.serialization.shipped_names import SGLANG_MODULE

from .params import Expects, ModelFacts, ProcessorParams


class ThinkingBudgetParams(ProcessorParams):
    """See `ThinkingBudgetLogitProcessor`."""

    thinking_budget: Annotated[
        Annotated[int, Field(ge=0)] | None, Expects("an integer, 0 or greater, or null for no limit")
    ]
    """Maximum tokens after the start of thinking. null: no limit."""


class ThinkingBudgetLogitProcessor(ForcedTokenProcessor):
    """Ends an open thinking block once `thinking_budget` tokens follow its start token.

    From then on, each step allows one token only: a new line, then, after a new line, the end of thinking. The token's
    logit is set to 0, all others to -inf. Subclasses define the tokens of a model.
    """

    _pickles_as: ClassVar[tuple[str, str]] = (SGLANG_MODULE, "ThinkingBudgetLogitProcessor")

    THINKING_START_TOKEN_ID: ClassVar[int]
    THINKING_END_TOKEN_ID: ClassVar[int]
    NEW_LINE_TOKEN_ID: ClassVar[int]

    Params = ThinkingBudgetParams
    example: ClassVar[Mapping[str, Any]] = {"thinking_budget": 3}

    @classmethod
    def check_model(cls, model: ModelFacts) -> None:
        """Refuse a model that lacks the tokens that this class forces."""
        for attribute in ("THINKING_START_TOKEN_ID", "THINKING_END_TOKEN_ID", "NEW_LINE_TOKEN_ID"):
            token_id = getattr(cls, attribute, None)
            if token_id is None:
                raise ValueError(f"{cls.__name__} has no {attribute}: use the subclass for the model")
            if not 0 <= token_id < model.vocab_size:
                raise ValueError(
                    f"{cls.__name__} is not for this model: its {attribute} {token_id} is outside the vocabulary "
                    f"(0 to {model.vocab_size - 1})"
                )

    def forced_token(self, params: dict[str, Any]) -> int | None:
        """See `ForcedTokenProcessor.forced_token`."""
        key = f"thinking_budget:{self.THINKING_START_TOKEN_ID}:{self.THINKING_END_TOKEN_ID}"
        budget = params.get("thinking_budget")
        # Of these, only None passes admission. But parameters of a shipped subclass are not validated there.
        if not isinstance(budget, int) or budget < 0:
            return None
        request = params["__req__"]
        prompt, output, state = request.origin_input_ids, request.output_ids, request.state
        read, last, start = self._read(prompt, output, *state.get(key, _UNREAD))
        # A tuple, so that copies of the state share nothing mutable.
        state[key] = read, last, start
        if start is None or read - start <= budget:
            return None
        # A new line at the end of the prompt does not count: SGLang only checks the output.
        return self.THINKING_END_TOKEN_ID if last == self.NEW_LINE_TOKEN_ID else self.NEW_LINE_TOKEN_ID

    def _read(
        self, prompt: Sequence[int], output: Sequence[int], read: int, last: int | None, start: int | None
    ) -> tuple[int, int | None, int | None]:
        """Read the new tokens of prompt + output.

        Args:
            prompt: prompt token ids.
            output: output token ids.
            read: number of tokens read before.
            last: the last output token read before.
            start: index of the start token of the block that was open after these, or None.

        Returns:
            `read`, `last` and `start` after all tokens.
        """
        num_prompt = len(prompt)
        length = num_prompt + len(output)
        # Tokens were removed, so read again. Replaced tokens are detected if the last one differs, as in
        # `StateHistory`.
        if read > length or (read > num_prompt and last != output[read - num_prompt - 1]):
            read, start = 0, None
        # Backward, because the last marker decides.
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
