"""SGLang's tensor-parallel ranks: each computes all logits, and must sample the same tokens from them.

Assumptions, which are SGLang's own about its ranks:
* They get the same requests and aborts in the same order, and schedule the same batches.
* From the same logits they sample the same tokens, because their generators of random numbers are in the same state.

Guarantees:
* All ranks of a process group run the plugin, of one version; else none of them starts.
* `share` and `from_first` are called on all ranks or on none: that depends on the batch and on the requests that wait.
  What only the first rank knows (processors, their answers, faults, time) reaches the others through them, and decides
  nothing before.
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import torch

from logitship.server.runtime.ranks import GroupRanks, check_default_group

T = TypeVar("T")
EndedRows: TypeAlias = dict[int, tuple[str, int]]
"""Row → message and number of output tokens of a request that ends."""


class SamplingRanks(GroupRanks):
    """The ranks that sample the same rows. The first one runs the processors."""

    def share(self, logits: torch.Tensor, rows: list[int], ended: EndedRows) -> EndedRows:
        """Overwrite the rows that the first rank edited, and return which requests it ends. All ranks call it.

        Args:
            logits: [rows, vocab].
            rows: the edited rows, on the first rank.
            ended: the requests that end, on the first rank.
        """
        rows, ended = self.from_first((rows, ended))
        self.broadcast(logits, rows)
        return ended

    def from_first(self, value: T) -> T:
        """Return the first rank's value. All ranks call it."""
        return value if self.size == 1 else self._group.broadcast_object(value, src=0)


def sampling_ranks() -> SamplingRanks:
    """Return the ranks that sample the same rows as this process.

    Raises:
        ValueError: another rank does not run the plugin.
    """
    from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

    check_default_group(range(torch.distributed.get_world_size()), "SGLang")
    return SamplingRanks(get_parallel().attn_tp_group)
