"""Cores of their own for the threads that compute a forward pass.

PyTorch divides an operation among a team of OpenMP threads: the one that calls, and workers that sleep when nothing has
come for some milliseconds. Linux often wakes a worker on the core of the thread that wakes it, which then waits for the
worker and keeps it from running: until the system notices, 10 to 40 ms are gone. On a machine with many other things to
do, that is the first step after each pause.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

import torch

_TASKS = Path("/proc/self/task")
_MARK = "omp-team"
_DIVIDED = 1 << 20
"""Numbers in a tensor of which PyTorch gives a part to each thread."""


class CoreBinding:
    """Binds the thread that makes it, while in a `with` block, and its OpenMP workers for good.

    Only in the block, because threads and processes inherit from who starts them: nothing starts any in a forward pass.
    Does nothing where the team does not fill all the cores that this process may use. Somebody else would have to say
    which of them are free: two servers would choose the same.
    """

    def __init__(self) -> None:
        self._all_cores: set[int] = set()
        self._own_core: set[int] = set()
        if not _TASKS.exists():
            return
        cores = sorted(os.sched_getaffinity(0))
        workers = _workers() if 1 < torch.get_num_threads() == len(cores) else []
        if len(workers) == len(cores) - 1 > 0:
            self._all_cores, self._own_core = set(cores), {cores[0]}
            for worker, core in zip(workers, cores[1:], strict=True):
                os.sched_setaffinity(worker, {core})

    def __enter__(self) -> None:
        if self._own_core:
            os.sched_setaffinity(0, self._own_core)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._own_core:
            os.sched_setaffinity(0, self._all_cores)


def _workers() -> list[int]:
    """Thread ids of the calling thread's OpenMP workers.

    A thread inherits the name of the one that starts it. So this one has another name while it does what needs the
    team, for the first time: workers that were there before are not found.
    """
    own = threading.get_native_id()
    name = _TASKS / str(own) / "comm"
    before = name.read_text()
    name.write_text(_MARK)
    try:
        torch.ones(_DIVIDED).add_(1)
    finally:
        name.write_text(before.strip())
    return [task for task in sorted(map(int, os.listdir(_TASKS))) if task != own and _name(task) == _MARK]


def _name(task: int) -> str:
    try:
        return (_TASKS / str(task) / "comm").read_text().strip()
    except OSError:  # it has ended meanwhile
        return ""
