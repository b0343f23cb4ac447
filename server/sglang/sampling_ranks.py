"""SGLang's tensor-parallel ranks: each computes all logits, and must sample the same tokens from them."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

EndedRows: TypeAlias = dict[int, tuple[str, int]]
"""Row → message and number of output tokens of a request that ends."""


class SamplingRanks:
    """The ranks that sample the same rows. The first one runs the processors.

    Args:
        group: SGLang's `GroupCoordinator` of them.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def is_first(self) -> bool:
        """True on the rank that runs the processors."""
        return self._group.rank_in_group == 0  # type: ignore[no-any-return]

    def share(
        self, logits: torch.Tensor, rows: list[int], ended: dict[int, tuple[str, int]]
    ) -> dict[int, tuple[str, int]]:
        """Overwrite the rows that the first rank edited, and return which requests it ends. All ranks call it.

        Args:
            logits: [rows, vocab].
            rows: the edited rows, on the first rank.
            ended: the requests that end, on the first rank.
        """
        if self._group.world_size == 1:
            return ended
        rows, ended = self._group.broadcast_object((rows, ended), src=0)
        if rows:
            logits[rows] = self._group.broadcast(logits[rows], src=0)
        return ended


def sampling_ranks() -> SamplingRanks:
    """Return the ranks that sample the same rows as this process."""
    from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

    return SamplingRanks(get_parallel().attn_tp_group)
