"""The priority of sandboxes: while one loads its class, the engine comes first.

A sandbox is a session of its own, for which Linux may have an autogroup. Between autogroups, neither the policy nor the
nice value of a process counts, but the nice value of its autogroup (`sched(7)`). So both are set.

Beside a busy core, a load gets a tenth of it. `SCHED_IDLE` or the lowest nice value would leave it a hundredth: an
honest class would then take ten seconds instead of a tenth of a second to load.

To lower a nice value again needs a privilege that root has. Without it, sandboxes load on the last core instead.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from pathlib import Path

_NICE = 10
"""Its weight is 110; that of a normal process is 1024."""


def lower(pid: int) -> None:
    """Lower the priority of a process. Does what the system permits, and can be undone by `restore`."""
    with contextlib.suppress(OSError):
        if can_restore():
            os.setpriority(os.PRIO_PROCESS, pid, _NICE)
            _set_autogroup(pid, _NICE)
        else:
            os.sched_setaffinity(pid, {max(os.sched_getaffinity(0))})


def restore(pid: int) -> None:
    """Give a process the normal priority again."""
    with contextlib.suppress(OSError):
        if can_restore():
            os.setpriority(os.PRIO_PROCESS, pid, _own_nice())
            _set_autogroup(pid, 0)
        else:
            os.sched_setaffinity(pid, os.sched_getaffinity(0))


@functools.cache
def can_restore() -> bool:
    """Return whether this process may lower nice values. Tried with a thread that then ends."""
    results: list[bool] = []

    def attempt() -> None:
        thread = threading.get_native_id()
        try:
            os.setpriority(os.PRIO_PROCESS, thread, 19)
            os.setpriority(os.PRIO_PROCESS, thread, _own_nice())
            results.append(True)
        except OSError:
            results.append(False)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return results == [True]


def _own_nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, os.getpid())


def _set_autogroup(pid: int, nice: int) -> None:
    with contextlib.suppress(OSError):  # the kernel has no autogroups
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))
