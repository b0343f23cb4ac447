"""Sampling masks of SGLang's steps, on the device, before its scheduler makes lists of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional

_PER_ROW = ("token_ids", "lengths", "selected_logprobs", "statuses")
"""Fields of SGLang's `SamplingMaskOutput` with an item for each row with a mask."""


@dataclass(frozen=True, eq=False)
class SampledMask:
    """Sampling mask of one row.

    Attributes:
        output: SGLang's `SamplingMaskOutput`.
        row: the row among those with masks.
        support_row: the row among those with the log-probabilities of all tokens; None: it has only that of its token.
    """

    output: Any
    row: int
    support_row: int | None

    def overwrite(self, other: SampledMask) -> None:
        """Put this mask in the place of another step's, for the same request."""
        fields = [(name, self.row, other.row) for name in _PER_ROW]
        if self.support_row is not None and other.support_row is not None:
            fields.append(("support_logprobs", self.support_row, other.support_row))
        for name, row, place in fields:
            values, others = getattr(self.output, name)[row], getattr(other.output, name)
            if values.ndim:
                missing = values.shape[-1] - others.shape[-1]
                if missing > 0:
                    others = torch.nn.functional.pad(others, (0, missing))
                    setattr(other.output, name, others)
                others[place, : values.shape[-1]] = values.to(others.device)
            else:
                others[place] = values.to(others.device)


def masks_of(info: Any, output: Any) -> Mapping[int, SampledMask]:
    """Return the masks of a step by row of the batch.

    Args:
        info: SGLang's `SamplingBatchInfo`.
        output: SGLang's `LogitsProcessorOutput`.
    """
    found = getattr(output, "sampling_mask_output", None)
    if found is None:
        return {}
    rows = [row for row, is_asked in enumerate(info.return_sampling_masks) if is_asked]
    with_support = info.sampling_support_logprobs_capture_indices
    places = {} if with_support is None else {row: place for place, row in enumerate(with_support.tolist())}
    return {row: SampledMask(found, place, places.get(place)) for place, row in enumerate(rows)}
