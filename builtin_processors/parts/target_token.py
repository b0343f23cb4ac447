"""The token that is to end an answer, or a part of one, and when it may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from logitship.builtin_processors.params import Expects, ModelFacts, ProcessorParams

from .state_history import StateHistory
from .text_tokens import TokenOfTextOrEnd, sentence_ends


class TargetTokenParams(ProcessorParams):
    """See `TargetToken`."""

    complete_sentences: Annotated[bool, Expects("true or false")] = False
    """Whether to wait until the last token is a full stop or a new line."""
    boost_token_str: TokenOfTextOrEnd = Field(default=None, validate_default=True)
    """The token to use in place of the end token, for instance `</think>`."""


@dataclass(frozen=True)
class TargetToken:
    """A token that is wanted once.

    Attributes:
        token: the token.
        after: the tokens of which one must be the last before it; None: it may follow any.
    """

    token: int
    after: frozenset[int] | None

    @classmethod
    def of(cls, params: TargetTokenParams, model: ModelFacts) -> TargetToken:
        """What a request asks for."""
        return cls(params.boost_token_str, sentence_ends(model) if params.complete_sentences else None)

    def is_due(self, params: Mapping[str, Any], key: str) -> bool:
        """Whether it may be the next token of a row: it is not in the output yet, and the last token lets it follow.

        Of NVIDIA's two variants this is, before the first token: vLLM's for the token, which may be in the prompt, and
        that for transformers for the last token, which is the prompt's.

        Args:
            params: of the row, `__req__` included.
            key: of the sequence's state.
        """
        request = params["__req__"]
        if key not in request.state:
            request.state[key] = StateHistory(False)
        history: StateHistory[bool] = request.state[key]
        if history.follow(request.output_ids, lambda drawn, token: drawn or token == self.token):
            return False
        if self.after is None:
            return True
        last = (request.output_ids or request.origin_input_ids)[-1:]
        return bool(last) and last[0] in self.after
