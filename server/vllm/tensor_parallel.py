"""vLLM's tensor-parallel ranks: each computes all logits and must sample the same tokens from them.

The first one runs the processors and broadcasts its rows. With pipeline parallelism, only the ranks of the last stage
sample.
"""

from __future__ import annotations

from vllm.distributed import get_pp_group, get_tp_group  # pyright: ignore[reportMissingImports]

from logitship.server.runtime.ranks import GroupRanks, check_default_group


class TensorParallelRanks(GroupRanks):
    """The ranks of this process's tensor-parallel group.

    Raises:
        ValueError: another rank does not run the plugin.
    """

    def __init__(self) -> None:
        super().__init__(get_tp_group())
        check_default_group(self._group.ranks, "vLLM")

    @property
    def is_first(self) -> bool:
        """True on the rank that runs the processors."""
        return super().is_first and bool(get_pp_group().is_last_rank)
