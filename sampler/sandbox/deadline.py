"""The deadline of a call: CPU time of the sandbox's process, with a wall-clock backstop.

The wall clock alone would kill an honest processor because its neighbours keep the cores busy. So CPU time counts,
which a process only uses while it runs. A process that waits uses none: it is killed once the same time has passed by
the wall clock. The backstop ends the call of a process that could run, but gets no core.

The wall clock starts once somebody waits for the answer. Until then, a forward pass may take as long as it likes.
"""

from __future__ import annotations

import time

BACKSTOP = 5.0
"""Longest wall-clock time of a call, as a multiple of its CPU time."""

DEFERRED_BACKSTOP = 60.0
"""The same for a call that no step waits for: it only gets what others leave of the cores."""

_SHORTEST_WAIT = 0.01
"""Seconds until the next look at a process that is nearly due."""

_BLOCKED_WAIT = 0.05
"""Seconds until the second look at a process that waits."""

_CPUCLOCK_SCHED = 2
"""Kind of a process's clock that counts its CPU time in nanoseconds: `include/linux/posix-timers.h`."""


class ProcessClock:
    """CPU time and state of another process. Any process may read them, whatever its user.

    Args:
        pid: its PID in this process's PID namespace.
    """

    def __init__(self, pid: int) -> None:
        self._clock = (~pid << 3) | _CPUCLOCK_SCHED  # `clock_getcpuclockid(3)`, which Python lacks
        self._stat = f"/proc/{pid}/stat"

    def cpu_seconds(self) -> float | None:
        """Return the CPU time used so far; None if the process has ended. Takes less than a microsecond."""
        try:
            return time.clock_gettime(self._clock)
        except OSError:
            return None

    def is_runnable(self) -> bool:
        """Return whether it runs, or waits for nothing but a core."""
        try:
            with open(self._stat, "rb") as file:
                return file.read().rpartition(b")")[2].split()[0] == b"R"
        except (OSError, IndexError):  # it has ended
            return False


class CallDeadline:
    """The deadline of one call, which begins now.

    Args:
        clock: clock of the process that answers.
        seconds: CPU time that the call may take; and wall-clock time, as far as the process waits.
        backstop: wall-clock seconds that the call may take at most; None: `BACKSTOP` times as long.
        is_awaited: False if nobody waits for the answer before `start_waiting`.

    Attributes:
        began: `time.perf_counter` at the start of the call.
        next_look: `time.perf_counter` when `exceeded` must be called, not before.
    """

    def __init__(
        self, clock: ProcessClock, seconds: float, backstop: float | None = None, *, is_awaited: bool = True
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._backstop = BACKSTOP * seconds if backstop is None else backstop
        self._cpu_began = clock.cpu_seconds()
        self._cpu_blocked: float | None = None
        self.began = time.perf_counter()
        self._waiting_since = self.began if is_awaited else None
        self.next_look = self.began + seconds

    def cpu_seconds(self) -> float:
        """Return the CPU time of the call so far; its wall-clock time if that is unknown."""
        now = self._clock.cpu_seconds()
        if now is None or self._cpu_began is None:
            return time.perf_counter() - self.began
        return now - self._cpu_began

    def start_waiting(self) -> None:
        """Count wall-clock time from now on, unless it is counted already."""
        if self._waiting_since is None:
            self._waiting_since = time.perf_counter()
            self.next_look = self._waiting_since + max(0.0, self._seconds - self.cpu_seconds())

    def extend(self, backstop: float) -> None:
        """Give the call more wall-clock seconds, counted from the same moment."""
        self._backstop = backstop

    def exceeded(self) -> str | None:
        """Return the limit that was exceeded, as the end of "gave no answer within …"; None: wait until `next_look`."""
        cpu, now = self.cpu_seconds(), time.perf_counter()
        if cpu >= self._seconds:
            return f"{self._seconds:.4g} s of CPU time"
        if self._waiting_since is None:
            self.next_look = now + max(self._seconds - cpu, _SHORTEST_WAIT)
            return None
        if now - self._waiting_since >= self._backstop:
            return f"{self._backstop:.4g} s, in which it got {cpu:.3f} s of CPU time"
        # Looked at twice: a process that pages in memory, for example, also waits for a moment.
        if self._clock.is_runnable():
            self._cpu_blocked = None
        elif self._cpu_blocked == cpu:
            return f"{self._seconds:.4g} s"
        else:
            self._cpu_blocked = cpu
        wait = max(self._seconds - cpu, _SHORTEST_WAIT) if self._cpu_blocked is None else _BLOCKED_WAIT
        self.next_look = min(now + wait, self._waiting_since + self._backstop)
        return None
