"""Logits that do not exist yet: a tensor that records edits, and waits where somebody uses its values.

Most processors never look at a logit. They look at the history, and forbid, force or bias tokens. So they are called
while the model computes, with a tensor whose values are a promise. Edits are recorded in an `EditLog`. The first
operation that needs a value fetches the logits, on which the recorded edits are made, and from then on every operation
works on these.

Assumptions:
* The author's code does not depend on when one of the tensors is freed: they are used again, see `take_back` and
  `Promise.begin`.

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
from .promised_tensor import PromisedLogits, take_back, wrap
from .promised_values import LogitsView
from .recorded_operations import add_recorded_operations

add_recorded_operations()


class Promise:
    """The promised logits of a call. Reused for later calls, because creating the objects takes longer than an edit.

    Args:
        source: fetches them, if their values are used.

    Attributes:
        is_kept: True if the author's code still had a promised tensor when its call ended.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._memory = Memory(source)
        self._view = LogitsView(self._memory, range(source.num_rows), is_one=False)
        self.is_kept = False

    @classmethod
    def begin(
        cls, num_rows: int, vocab_size: int, fetch: Callable[[], torch.Tensor], recent: RecentCalls | None = None
    ) -> Promise:
        """Begin a call. Reuse the promise of an earlier call, if nothing refers to its tensors any more.

        See `Source` for the arguments.
        """
        promise: Promise | None = None if recent is None else recent.promises.pop((num_rows, vocab_size), None)
        if promise is None:
            return cls(Source(num_rows, vocab_size, fetch, recent))
        promise._source.begin(fetch)
        return promise

    def take(self) -> PromisedLogits:
        """Return the tensor for the author's code, float32 [num_rows, vocab_size]."""
        return wrap(self._view)

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
        source = self._source
        self.is_kept = not take_back(source)
        if self.is_kept:
            source.read()
        if state is not None:
            is_log = state is self._view or (
                isinstance(state, LogitsView) and state.is_whole and state.memory.source is source
            )
            result = state.memory.log if is_log and state.memory.is_pending else state.real
        source.end()
        if not source.was_read:
            self._memory.clear()
            source.recent.keep(self, (source.num_rows, source.vocab_size))
        return result

    def end(self) -> None:
        """End a call that returned nothing, too: its logits cannot be fetched any more."""
        self._source.end()
