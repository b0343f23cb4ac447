"""The priorities of sandboxes: what nobody's step waits for runs behind the engine.

Nice values count between the threads of one session: where Linux has autogroups, each session gets the same share of
the cores, whatever the nice values of its processes (`sched(7)`). So sandboxes stay in the server's session.

To lower a nice value again needs a privilege (`CAP_SYS_NICE`). Without it, a sandbox keeps the lowest priority that it
ever had.
"""

from __future__ import annotations

import contextlib
import os

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


def _own_nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, os.getpid())
