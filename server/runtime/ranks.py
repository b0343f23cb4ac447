"""Ranks that sample the same tokens: all run one version of logitship, and only the first one calls processors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

STARTING = timedelta(minutes=5)
"""Longest time between the starts of two ranks that have loaded the model."""


class GroupRanks:
    """The ranks of an engine's process group that sample the same tokens. Implements `Ranks`.

    Args:
        group: the engine's `GroupCoordinator` of them. SGLang has it from vLLM.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def is_first(self) -> bool:
        """True on the rank that runs the processors."""
        return bool(self._group.rank_in_group == 0)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(self._group.world_size)

    def broadcast(self, logits: torch.Tensor, rows: Sequence[int]) -> None:
        """Overwrite some rows of the logits with those of the first rank. All ranks call it for the same rows.

        Args:
            logits: [rows, vocab].
            rows: the rows.
        """
        if self.size > 1 and rows:
            logits[rows] = self._group.broadcast(logits[rows], src=0)


@contextmanager
def own_random_numbers(num_ranks: int) -> Iterator[None]:
    """Restore torch's generators of random numbers after code of a request has run in this process.

    It only runs on the first rank, which would sample other tokens than the others from then on.

    Args:
        num_ranks: number of ranks; nothing is restored for one.
    """
    if num_ranks == 1:
        yield
        return
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        yield


def check_default_group(ranks: Sequence[int], engine: str) -> None:
    """Wait until some ranks of the default process group run the plugin, see `check_ranks`."""
    if len(ranks) > 1:
        store = torch.distributed.distributed_c10d._get_default_store()
        check_ranks(store, torch.distributed.get_rank(), ranks, STARTING, engine)


def check_ranks(store: Store, rank: int, ranks: Sequence[int], timeout: timedelta, engine: str) -> None:
    """Wait until some ranks of a process group run the plugin.

    A rank without it, on another host for example, would not take part in what the others share, for which they wait;
    in SGLang, it would unpickle processors.

    Args:
        store: the process group's.
        rank: this process's.
        ranks: those that run the plugin.
        timeout: longest time to wait.
        engine: the engine's name.

    Raises:
        ValueError: one does not run it, or runs another version.
    """
    own = version("logitship")
    store.set(_key(rank), own)
    try:
        store.wait([_key(each) for each in ranks], timeout)
    except DistStoreError:
        missing = [each for each in ranks if not store.check([_key(each)])]
        raise ValueError(
            f"logitship does not run in ranks {missing}: install it on their hosts, with the same {engine} and the "
            "same settings; their logs say why if it is there"
        ) from None
    others = {each: text for each in ranks if (text := store.get(_key(each)).decode()) != own}
    if others:
        found = ", ".join(f"{text} in rank {each}" for each, text in others.items())
        raise ValueError(f"logitship's version is {own} in rank {rank}, and {found}: install the same on all")


def _key(rank: int) -> str:
    return f"logitship/rank/{rank}"
