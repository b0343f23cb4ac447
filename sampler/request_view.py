"""`__req__`: what a processor may know of the request whose row it edits (contract 2)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sampling_params import SamplingParams


@dataclass(frozen=True)
class ModelView:
    """What processors may know of the model: the same for all requests."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    tokenizer: Any


class RequestView:
    """One sequence as its processor sees it. Attribute names are those of SGLang's `Req`.

    The lists are the view's own: a processor that edits them harms nobody else.

    Attributes:
        rid: the request id.
        origin_input_ids: the prompt's token ids.
        output_ids: the token ids that this row continues, exactly.
        sampling_params: the request's sampling parameters.
        eos_token_ids: the model's end tokens.
        vocab_size: number of columns of the logits.
        tokenizer: the model's tokenizer, a Hugging Face one.
        state: a dict that belongs to this one sequence and this one processor, empty at first.
    """

    __slots__ = (
        "eos_token_ids",
        "origin_input_ids",
        "output_ids",
        "rid",
        "sampling_params",
        "state",
        "tokenizer",
        "vocab_size",
    )

    def __init__(
        self,
        *,
        rid: str,
        prompt_token_ids: list[int],
        output_token_ids: list[int],
        sampling_params: SamplingParams,
        model: ModelView,
    ) -> None:
        """Make the view of a sequence.

        Args:
            output_token_ids: the output tokens so far; `OutputFollower` adds those that come.
        """
        self.rid = rid
        self.origin_input_ids = list(prompt_token_ids)
        self.output_ids = list(output_token_ids)
        self.sampling_params = copy.copy(sampling_params)
        self.eos_token_ids = set(model.eos_token_ids)
        self.vocab_size = model.vocab_size
        self.tokenizer = model.tokenizer
        self.state: dict[Any, Any] = {}


class OutputFollower:
    """Keeps the `output_ids` of a view in step with the engine's list.

    Apart from the view: whatever a processor does to its view, nothing here fails.

    Args:
        output_token_ids: the engine's own list of output tokens, which grows.

    Attributes:
        output_ids: the view's list.
    """

    def __init__(self, view: RequestView, output_token_ids: list[int]) -> None:
        self._view = view
        self.output_ids = view.output_ids
        self._live = output_token_ids
        self._num_known = len(output_token_ids)

    def sync(self) -> None:
        """Take over the tokens that came since the last step."""
        # Not the length of `output_ids`: the processor may have edited that.
        if self._num_known < len(self._live):
            self.output_ids.extend(self._live[self._num_known :])
            self._num_known = len(self._live)
            self._view.output_ids = self.output_ids  # it may have been replaced or deleted

    def fork(self, view: RequestView, output_ids: list[int], output_token_ids: list[int]) -> OutputFollower:
        """The same for a sequence that goes on by itself from the tokens that are known so far.

        Args:
            view: a copy of the view.
            output_ids: the copy's list.
            output_token_ids: the engine's list of the other sequence; begins with the tokens that are known here.
        """
        twin = copy.copy(self)
        twin._view, twin.output_ids, twin._live = view, output_ids, output_token_ids
        return twin
