"""A token to boost or enforce once, such as the EOS token, and when it may occur."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from logitship.builtin_processors.params import Expects, ModelFacts, ProcessorParams

from .state_history import StateHistory
from .text_tokens import TokenOfTextOrEos, sentence_ends


class TargetTokenParams(ProcessorParams):
    """See `TargetToken`."""

    complete_sentences: Annotated[bool, Expects("true or false")] = False
    """Wait until the last token is a full stop or a new line."""
    boost_token_str: TokenOfTextOrEos = Field(default=None, validate_default=True)
    """The token to use instead of the EOS token, for instance `</think>`."""


@dataclass(frozen=True)
class TargetToken:
    """A token that is to be sampled once.

    Attributes:
        token: the token.
        after: the tokens that it may follow; None for all.
    """

    token: int
    after: frozenset[int] | None

    @classmethod
    def of(cls, params: TargetTokenParams, model: ModelFacts) -> TargetToken:
        """Build from a request's parameters."""
        return cls(params.boost_token_str, sentence_ends(model) if params.complete_sentences else None)

    def is_due(self, params: Mapping[str, Any], key: str) -> bool:
        """Return whether it may be the next token of a row: it is not in the output, and may follow the last token.

        NVIDIA's two variants differ before the first output token. As in the one for vLLM, the prompt may contain the
        token; as in the one for transformers, the last token is then the prompt's.

        Args:
            params: the row's parameters, `__req__` included.
            key: key in the sequence's state.
        """
        request = params["__req__"]
        if key not in request.state:
            request.state[key] = StateHistory(False)
        history: StateHistory[bool] = request.state[key]
        if history.follow(request.output_ids, lambda sampled, token: sampled or token == self.token):
            return False
        if self.after is None:
            return True
        last = (request.output_ids or request.origin_input_ids)[-1:]
        return bool(last) and last[0] in self.after
