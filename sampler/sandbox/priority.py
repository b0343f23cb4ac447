"""The priority of sandboxes: while one loads its class, it gets only the CPU time that nobody else wants.

A sandbox is a session of its own, for which Linux may have an autogroup. Between autogroups, neither the policy nor the
nice value of a process counts, but the nice value of its autogroup (`sched(7)`). So both are set.

Leaving `SCHED_IDLE` needs a privilege that root has. Without it, sandboxes load on the last core instead.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from pathlib import Path

_LOWEST = 19


def lower(pid: int) -> None:
    """Lower the priority of a process. Does what the system permits, and can be undone by `restore`."""
    with contextlib.suppress(OSError):
        if can_restore():
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
            _set_autogroup(pid, _LOWEST)
        else:
            os.sched_setaffinity(pid, {max(os.sched_getaffinity(0))})


def restore(pid: int) -> None:
    """Give a process the normal priority again."""
    with contextlib.suppress(OSError):
        if can_restore():
            os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
            _set_autogroup(pid, 0)
        else:
            os.sched_setaffinity(pid, os.sched_getaffinity(0))


@functools.cache
def can_restore() -> bool:
    """Return whether this process may take another out of `SCHED_IDLE`. Tried with a thread that then ends."""
    results: list[bool] = []

    def attempt() -> None:
        thread = threading.get_native_id()
        try:
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
            results.append(True)
        except OSError:
            results.append(False)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return results == [True]


def _set_autogroup(pid: int, nice: int) -> None:
    with contextlib.suppress(OSError):  # the kernel has no autogroups
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))
