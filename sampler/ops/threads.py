"""How many threads PyTorch uses on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_FEW = 2**18
"""Of so many numbers, one thread reads all in tens of microseconds."""


@contextmanager
def one_thread_for_few(matrix: torch.Tensor) -> Iterator[None]:
    """Operations on a small matrix are not divided among threads meanwhile.

    They would gain a few microseconds, and lose milliseconds wherever another thread finds its core busy.
    """
    threads = torch.get_num_threads()
    if matrix.device.type != "cpu" or matrix.numel() > _FEW or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
