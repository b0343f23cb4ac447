"""Logits that do not exist yet: a tensor that records edits, and waits where somebody uses its values.

Most processors never look at a logit. They look at the history, and forbid, force or bias tokens. So they are called
while the model computes, with a tensor whose values are a promise. Edits are recorded in an `EditLog`. The first
operation that needs a value fetches the logits, on which the recorded edits are made, and from then on every operation
works on these.

Guarantees:
* The results have the same bits as those of a call with the real logits.
* What would raise with the real logits raises at the same place, and nothing else does: an edit is recorded only if it
  cannot raise. Everything else fetches the logits, and is left to PyTorch.
* Indices and values are copied: authors may change them afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .promised_memory import Memory, RecentCalls, Source
from .promised_tensor import PromisedLogits, wrap
from .promised_values import LogitsView
from .recorded_operations import add_recorded_operations

add_recorded_operations()


class Promise:
    """The promised logits of a call.

    Args:
        source: fetches them, if their values are used.

    Attributes:
        is_kept: True if the author's code still had a promised tensor when its call ended.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._memory = Memory(source)
        self.is_kept = False

    @classmethod
    def begin(
        cls, num_rows: int, vocab_size: int, fetch: Callable[[], torch.Tensor], recent: RecentCalls | None = None
    ) -> Promise:
        """Begin a call. See `Source` for the arguments."""
        return cls(Source(num_rows, vocab_size, fetch, recent))

    def take(self) -> PromisedLogits:
        """Return the tensor for the author's code, float32 [num_rows, vocab_size]."""
        return wrap(LogitsView(self._memory, range(self._source.num_rows), is_one=False))

    def conclude(self, result: object) -> object:
        """End the call.

        Args:
            result: what the author's code returned. The caller keeps no reference to it.

        Returns:
            An `EditLog` that leads to the result, if no value was used. Else the result; where it was promised, the
            tensor that it stands for.
        """
        state = result.promised_state if type(result) is PromisedLogits else None
        if state is not None:
            result = None
        self.is_kept = self._source.is_referred_to()
        if self.is_kept:
            self._source.read()
        if state is not None:
            is_log = state.memory.is_pending and isinstance(state, LogitsView) and state.is_whole
            result = state.memory.log if is_log and state.memory.source is self._source else state.real
        self.end()
        return result

    def end(self) -> None:
        """End a call that returned nothing, too: its logits cannot be fetched any more."""
        self._source.end()
