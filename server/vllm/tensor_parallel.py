"""vLLM's tensor-parallel ranks: each computes all logits and samples the same tokens from them.

With pipeline parallelism, only the ranks of the last stage sample.
"""

from __future__ import annotations

import torch
from vllm.distributed import get_pp_group, get_tp_group  # pyright: ignore[reportMissingImports]

from logitship.server.runtime.ranks import check_default_group


class TensorParallelRanks:
    """The ranks of this process's tensor-parallel group. Implements `VllmRanks`.

    Raises:
        ValueError: another rank does not run the plugin.
    """

    def __init__(self) -> None:
        self._group = get_tp_group()
        check_default_group(self._group.ranks, "vLLM")

    @property
    def is_first(self) -> bool:
        """True on the rank that runs the processors."""
        return bool(self._group.rank_in_group == 0 and get_pp_group().is_last_rank)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(self._group.world_size)

    def broadcast(self, logits: torch.Tensor, rows: list[int]) -> None:
        """Overwrite some rows of the logits with those of the first rank."""
        if self.size > 1:
            logits[rows] = self._group.broadcast(logits[rows], src=0)
