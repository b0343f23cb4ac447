"""The priorities of sandboxes, and their cores: what nobody's step waits for runs behind the engine.

Nice values count between the threads of one session: where Linux has autogroups, each session gets the same share of
the cores, whatever the nice values of its processes (`sched(7)`). So sandboxes stay in the server's session.

To lower a nice value again needs a privilege (`CAP_SYS_NICE`). Without it, a sandbox keeps the lowest priority that it
ever had.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

LOADING = 10
"""Nice value while a class is loaded: beside a busy core, it gets a tenth of it. The lowest priority would leave it a
hundredth: an honest class would then take ten seconds instead of a tenth of a second to load."""

DEFERRED = 19
"""Nice value during a call that no step waits for. There may be many."""


def lower(pid: int, nice: int) -> None:
    """Give a process this nice value, or the server's own if that is higher."""
    with contextlib.suppress(OSError):  # it has ended
        os.setpriority(os.PRIO_PROCESS, pid, max(nice, _own_nice()))


def restore(pid: int) -> None:
    """Give a process the server's own nice value again, if that is permitted."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, _own_nice())


@contextlib.contextmanager
def off_this_core(pid: int) -> Iterator[None]:
    """Let a process that is woken inside start on another core than that of the calling thread, if it may use one.

    Where no core is idle, Linux often wakes a process on the core of the thread that wakes it, which then has to wait.
    Other cores are no less busy, but often only with OpenMP's workers, which spin until the next forward pass.
    """
    cores = others = set[int]()
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        cores = os.sched_getaffinity(pid)
        others = cores - {_libc.sched_getcpu()}
        if others:
            os.sched_setaffinity(pid, others)
    try:
        yield
    finally:
        if others:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(pid, cores)


def _own_nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, os.getpid())


_libc = ctypes.CDLL(None)
