"""`__req__`: the view of a request that its processor gets (contract 2)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logitship.sampler.sampling_params import SamplingParams


@dataclass(frozen=True)
class ModelView:
    """View of the model that processors get. The same for all requests."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    tokenizer: Any


class RequestView:
    """One sequence as its processor sees it. Attribute names are those of SGLang's `Req`.

    The lists are copies: a processor that edits them affects no other code. Attributes that it adds are kept like
    `state`.

    Attributes:
        rid: request id.
        origin_input_ids: token ids of the prompt.
        output_ids: exactly the output token ids that this row continues.
        sampling_params: sampling parameters of the request.
        eos_token_ids: end-of-sequence tokens of the model.
        vocab_size: number of columns of the logits.
        tokenizer: Hugging Face tokenizer of the model.
        state: dict for this sequence and this processor alone, empty at first.
    """

    __slots__ = (
        "__dict__",
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
        """Create the view of a sequence. `OutputFollower` appends later output tokens."""
        self.rid = rid
        self.origin_input_ids = list(prompt_token_ids)
        self._output_ids = list(output_token_ids)
        self._before_first_use: Callable[[], None] | None = None
        self.sampling_params = copy.copy(sampling_params)
        self.eos_token_ids = set(model.eos_token_ids)
        self.vocab_size = model.vocab_size
        self.tokenizer = model.tokenizer
        self.state: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Explain which attributes there are."""
        if name.startswith("_"):  # `copy` and `pickle` look for methods
            raise AttributeError(name)
        hint = _TEXT_HINT if "text" in name else ""
        raise AttributeError(f"__req__ has no attribute {name!r}; it has {', '.join(_PUBLIC)}{hint}", name=name)

    @property
    def output_ids(self) -> list[int]:
        """Output token ids, see the class."""
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


_PUBLIC = sorted({"output_ids", *(name for name in RequestView.__slots__ if not name.startswith("_"))})
_TEXT_HINT = ". For the text: __req__.tokenizer.decode(__req__.output_ids), or only its last tokens"


def _noop() -> None:
    pass


class OutputFollower:
    """Keeps the `output_ids` of a view in sync with the engine's list.

    Most processors never read `output_ids`, so they are only brought up to date on first use. After that, `sync` must
    be called before each call of the processor, which may have kept a reference to the list.

    Separate from the view, so that nothing a processor does to its view can break it.

    Args:
        view: view of the sequence.
        output_token_ids: the engine's live list of output tokens: it grows.
        on_first_use: called once, when a processor first uses `output_ids`.

    Attributes:
        is_used: True once a processor has used `output_ids`.
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
        """Append the tokens that were added since the last call, or remove those that were removed."""
        # Not the length of `_output_ids`: the processor may have edited that.
        if self._num_known < len(self._live):
            self._output_ids.extend(self._live[self._num_known :])
            self._num_known = len(self._live)
            self._view._output_ids = self._output_ids  # it may have been replaced or deleted
        elif self._num_known > len(self._live):
            del self._output_ids[len(self._live) - self._num_known :]
            self._num_known = len(self._live)

    def __deepcopy__(self, memo: dict[int, Any]) -> OutputFollower:
        """Return a follower for a copy of the view. It follows the same list until `follow` sets another."""
        fork = memo[id(self)] = copy.copy(self)
        fork._view, fork._output_ids = copy.deepcopy((self._view, self._output_ids), memo)
        return fork

    def follow(self, output_token_ids: list[int]) -> None:
        """Follow another list of the engine, which begins with the tokens known so far."""
        self._live = output_token_ids

    def _begin(self) -> None:
        self._view._before_first_use = None
        self.is_used = True
        self.sync()
        self._on_first_use()
