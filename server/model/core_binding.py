"""Binds each thread that computes a forward pass to its own core.

PyTorch divides an operation among a team of OpenMP threads: the calling thread, and workers that sleep after some idle
milliseconds. Linux often wakes a worker on the core of the thread that wakes it. That thread then spins while it waits,
and the worker cannot run until the system migrates it after 10 to 40 ms. On a busy machine, this slows the first step
after each pause.
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
"""Number of elements at which PyTorch divides an operation among all threads."""


class CoreBinding:
    """Binds the thread that creates it inside a `with` block, and its OpenMP workers permanently.

    The thread is bound in the block only, because new threads and processes inherit its affinity; a forward pass starts
    none. Does nothing if the team is smaller than the number of cores that this process may use: it cannot know which
    cores are free, and two servers would choose the same.
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
    """Return the thread ids of the calling thread's OpenMP workers.

    A thread inherits the name of the thread that starts it. So this thread is renamed during its first operation that
    needs the team. Workers that were started before are not found.
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
