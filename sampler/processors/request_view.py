"""`__req__`: what a processor may know of the request whose row it edits (contract 2)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logitship.sampler.sampling_params import SamplingParams


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
        "_before_first_use",
        "_output_ids",
        "eos_token_ids",
        "origin_input_ids",
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
        self._output_ids = list(output_token_ids)
        self._before_first_use: Callable[[], None] | None = None
        self.sampling_params = copy.copy(sampling_params)
        self.eos_token_ids = set(model.eos_token_ids)
        self.vocab_size = model.vocab_size
        self.tokenizer = model.tokenizer
        self.state: dict[Any, Any] = {}

    @property
    def output_ids(self) -> list[int]:
        """See the class."""
        if self._before_first_use is not None:
            self._before_first_use()
        return self._output_ids

    @output_ids.setter
    def output_ids(self, output_ids: list[int]) -> None:
        if self._before_first_use is not None:
            self._before_first_use()
        self._output_ids = output_ids

    @output_ids.deleter
    def output_ids(self) -> None:
        if self._before_first_use is not None:
            self._before_first_use()
        del self._output_ids


def _noop() -> None:
    pass


class OutputFollower:
    """Keeps the `output_ids` of a view in step with the engine's list.

    Before a processor has used them, nobody sees what they are, and most processors never do: the first use brings them
    up to date. From there on `sync` is due before each call, because the processor may have kept the list.

    Apart from the view: whatever a processor does to its view, nothing here fails.

    Args:
        output_token_ids: the engine's own list of output tokens, which grows.
        on_first_use: called once, when a processor uses `output_ids` for the first time.

    Attributes:
        is_used: a processor has used `output_ids`.
    """

    def __init__(
        self, view: RequestView, output_token_ids: list[int], on_first_use: Callable[[], None] = _noop
    ) -> None:
        self._view = view
        self._output_ids = view.output_ids
        self._live = output_token_ids
        self._num_known = len(output_token_ids)
        self._on_first_use = on_first_use
        self.is_used = False
        view._before_first_use = self._begin

    def sync(self) -> None:
        """Take over the tokens that came since the last call."""
        # Not the length of `_output_ids`: the processor may have edited that.
        if self._num_known < len(self._live):
            self._output_ids.extend(self._live[self._num_known :])
            self._num_known = len(self._live)
            self._view._output_ids = self._output_ids  # it may have been replaced or deleted

    def __deepcopy__(self, memo: dict[int, Any]) -> OutputFollower:
        """A copy for the view's copy. It follows the same list, until `follow` names another."""
        twin = memo[id(self)] = copy.copy(self)
        twin._view, twin._output_ids = copy.deepcopy((self._view, self._output_ids), memo)
        return twin

    def follow(self, output_token_ids: list[int]) -> None:
        """Go on with another list of the engine's, which begins with the tokens that are known so far."""
        self._live = output_token_ids

    def _begin(self) -> None:
        self._view._before_first_use = None
        self.is_used = True
        self.sync()
        self._on_first_use()
