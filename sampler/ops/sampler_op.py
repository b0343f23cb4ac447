"""The interface of the sampler's own operations: the state of a sampling parameter, and what a step does with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar, cast

import torch

from logitship.sampler.allowed_tokens import AllowedTokens
from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.batch_processors.logits_processors import BatchRows
from logitship.sampler.device_tensor import copies_to
from logitship.sampler.sampling_params import SamplingParams

State = TypeVar("State")
Prepared = TypeVar("Prepared")


class SamplingRow(NamedTuple):
    """A request that is added to the batch.

    Attributes:
        params: sampling parameters.
        prompt_token_ids: prompt.
        output_token_ids: the live output.
    """

    params: SamplingParams
    prompt_token_ids: list[int] | None
    output_token_ids: list[int]


class SamplerOp(ABC, Generic[State, Prepared]):
    """An operation on the rows that use it. Costs nothing if no row does.

    A subclass says what it keeps of a request (`new_state`) and what it makes of that for a step (`prepare`), and has a
    method that `Sampler.sample` calls, mostly `apply(logits, rows)`, which edits the logits in place.

    Args:
        device: device of the logits.
    """

    def __init__(self, device: torch.device) -> None:
        self._to_device = copies_to(device)
        self._rows: BatchRows[State] = BatchRows(lambda *added: self.new_state(SamplingRow(*added)))
        self._all: Prepared | None = None

    @abstractmethod
    def new_state(self, row: SamplingRow) -> State | None:
        """Return the state of a request that is added to the batch; None if it does not use the operation."""

    def prepare(self, states: Mapping[int, State]) -> Prepared:
        """Return what a step needs, such as tensors; by default the states. Called when the batch changes.

        Args:
            states: states of the rows that use the operation, at least one, by place in the logits, ascending.
        """
        return cast(Prepared, states)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply the changes of the batch. Once a step; None if no row changed."""
        if self._rows.update(batch_update):
            self._all = self.prepare(dict(sorted(self._rows.items()))) if self._rows else None

    def prepared(self, rows: Sequence[int] | None) -> Prepared | None:
        """Return what a step needs; None if no row uses the operation.

        Args:
            rows: rows of the batch that the logits belong to, ascending; None for all.
        """
        if rows is None:
            return self._all
        states = {place: self._rows[row] for place, row in enumerate(rows) if row in self._rows}
        return self.prepare(states) if states else None

    def restrict(self, row: int, allowed: AllowedTokens) -> None:
        """See `DecidesTokens`. The default is for operations that never remove the most likely token."""
