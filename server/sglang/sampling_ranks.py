"""SGLang's tensor-parallel ranks: each computes all logits, and must sample the same tokens from them.

Assumptions, which are SGLang's own about its ranks:
* They get the same requests and aborts in the same order, and schedule the same batches.
* From the same logits they sample the same tokens, because their generators of random numbers are in the same state.

Guarantees:
* All ranks of a process group run the plugin, of one version; else none of them starts (`check_ranks`).
* `share` is called on all ranks or on none: whether it is depends on the batch alone. What only the first rank knows
  (processors, their answers, faults, time) reaches the others through `share`, and decides nothing before it.
* The first rank's processors leave SGLang's generators as they were (`own_random_numbers`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from typing import Any, TypeAlias

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

EndedRows: TypeAlias = dict[int, tuple[str, int]]
"""Row → message and number of output tokens of a request that ends."""

STARTING = timedelta(minutes=5)
"""Longest time between the starts of two ranks that have loaded the model."""


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

    @contextmanager
    def own_random_numbers(self) -> Iterator[None]:
        """Restore torch's generators of random numbers after code of a request has run in this process.

        It only runs on the first rank, which would sample other tokens than the others from then on.
        """
        if self._group.world_size == 1:
            yield
            return
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(devices):
            yield

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
    """Return the ranks that sample the same rows as this process.

    Raises:
        ValueError: another rank does not run the plugin.
    """
    from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

    size = torch.distributed.get_world_size()
    if size > 1:
        store = torch.distributed.distributed_c10d._get_default_store()
        check_ranks(store, torch.distributed.get_rank(), size, STARTING)
    return SamplingRanks(get_parallel().attn_tp_group)


def check_ranks(store: Store, rank: int, size: int, timeout: timedelta) -> None:
    """Wait until all ranks of the process group run the plugin.

    A rank without it, on another host for example, would unpickle processors, and would not call `share`, for which
    the others wait.

    Args:
        store: the process group's.
        rank: this process's.
        size: number of ranks.
        timeout: longest time to wait.

    Raises:
        ValueError: one does not run it, or runs another version.
    """
    own = version("logitship")
    store.set(_key(rank), own)
    try:
        store.wait([_key(each) for each in range(size)], timeout)
    except DistStoreError:
        missing = [each for each in range(size) if not store.check([_key(each)])]
        raise ValueError(
            f"logitship does not run in ranks {missing}: install it on their hosts, with the same SGLang and the same "
            "settings; their logs say why if it is there"
        ) from None
    others = {each: text for each in range(size) if (text := store.get(_key(each)).decode()) != own}
    if others:
        found = ", ".join(f"{text} in rank {each}" for each, text in others.items())
        raise ValueError(f"logitship's version is {own} in rank {rank}, and {found}: install the same on all")


def _key(rank: int) -> str:
    return f"logitship/rank/{rank}"
