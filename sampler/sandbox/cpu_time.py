"""The CPU time of sandboxes: the deadlines of their calls, their priorities and their cores.

The wall clock alone would kill an honest processor because its neighbours keep the cores busy. So CPU time counts,
which a process only uses while it runs. A process that waits uses none: it is killed once the same time has passed by
the wall clock. The backstop ends the call of a process that could run, but gets no core.

The wall clock starts once a step waits for the answer, so that the length of the forward pass before does not matter.

Calls that no step waits for run at a lower priority than the engine. Nice values only have an effect between threads of
one session: where Linux has autogroups, each session gets the same share of the cores, whatever the nice values of its
processes (`sched(7)`). So sandboxes stay in the server's session. Lowering a nice value again needs a privilege
(`CAP_SYS_NICE`). Without it, a sandbox keeps the lowest priority that it ever had.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Collection, Iterator

BACKSTOP = 5.0
"""Longest wall-clock time of a call, as a multiple of its CPU time."""

DEFERRED_BACKSTOP = 60.0
"""`BACKSTOP` for a call that no step waits for: it only gets CPU time that others leave."""

_MIN_WAIT = 0.01
"""Seconds until the next look at a process that is nearly due."""

BLOCKED_WAIT = 0.05
"""Seconds until the second look at a process that waits."""

_PF_EXITING = 0x4
"""Flag of a process that the kernel is ending, see `proc_pid_stat(5)`. It closes files first, and frees memory then."""

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
        self._schedstat = f"/proc/{pid}/schedstat"

    def cpu_seconds(self) -> float | None:
        """Return the CPU time used so far; None if the process has ended. Takes less than a microsecond."""
        try:
            return time.clock_gettime(self._clock)
        except OSError:
            return None

    def is_runnable(self) -> bool:
        """Return whether it runs, or waits for nothing but a core."""
        fields = self._fields()
        return bool(fields) and fields[0] == b"R"

    def is_exiting(self) -> bool:
        """Return whether it ends, or has ended: none of its code runs any more."""
        fields = self._fields()
        return not fields or bool(int(fields[6]) & _PF_EXITING)

    def _fields(self) -> list[bytes]:
        """Return the fields from the third on, the state; none if the process is gone."""
        try:
            with open(self._stat, "rb") as file:
                return file.read().rpartition(b")")[2].split()
        except OSError:
            return []

    def seconds_without_core(self) -> float:
        """Return how long it has waited for a core so far; 0 if the kernel does not say, or it has ended."""
        try:
            # Without a file object, which would take half of the time.
            descriptor = os.open(self._schedstat, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return int(os.read(descriptor, 100).split()[1]) * 1e-9  # `Documentation/scheduler/sched-stats.rst`
            finally:
                os.close(descriptor)
        except (OSError, IndexError, ValueError):
            return 0.0


class CallDeadline:
    """The deadline of one call, which begins now.

    Args:
        clock: clock of the process that answers.
        seconds: CPU time that the call may take; and wall-clock time, as far as the process waits.
        backstop: wall-clock seconds that the call may take at most; None: `BACKSTOP` times as long.
        is_awaited: False if nobody waits for the answer before `start_waiting`.

    Attributes:
        began: `time.perf_counter` at the start of the call.
        next_look: `time.perf_counter` when `exceeded` must be called; before it, it returns None.
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
        self._without_core_before = clock.seconds_without_core() if is_awaited else 0.0
        self.next_look = self.began + seconds

    def cpu_seconds(self) -> float:
        """Return the CPU time of the call so far; its wall-clock time if that is unknown."""
        now = self._clock.cpu_seconds()
        if now is None or self._cpu_began is None:
            return time.perf_counter() - self.began
        return now - self._cpu_began

    def seconds_used(self) -> float:
        """Return the time of the call so far: its CPU time; or its wall-clock time, if it has waited for longer.

        Not counted is the time in which it waited for a core, which is not its own fault.
        """
        cpu = self.cpu_seconds()
        if self._waiting_since is None:
            return cpu
        return max(cpu, time.perf_counter() - self._waiting_since - self._seconds_without_core())

    def cpu_seconds_wanted(self) -> float:
        """Return the CPU time of the call so far, and for how long it waited for a core since somebody waits for it."""
        return self.cpu_seconds() + (0.0 if self._waiting_since is None else self._seconds_without_core())

    def _seconds_without_core(self) -> float:
        return max(0.0, self._clock.seconds_without_core() - self._without_core_before)

    def start_waiting(self) -> None:
        """Count wall-clock time from now on, unless it is counted already."""
        if self._waiting_since is None:
            self._waiting_since = time.perf_counter()
            self._without_core_before = self._clock.seconds_without_core()
            self.next_look = self._waiting_since + max(0.0, self._seconds - self.cpu_seconds())

    def extend(self, backstop: float) -> None:
        """Give the call more wall-clock seconds, counted from the same moment."""
        self._backstop = backstop

    def exceeded(self) -> str | None:
        """Return the limit that was exceeded, as the end of "gave no answer within …"; None: wait until `next_look`."""
        now = time.perf_counter()
        if now < self.next_look:
            return None
        cpu = self.cpu_seconds()
        if cpu >= self._seconds:
            return f"{self._seconds:.4g} s of CPU time"
        if self._waiting_since is None:
            self.next_look = now + max(self._seconds - cpu, _MIN_WAIT)
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
        wait = max(self._seconds - cpu, _MIN_WAIT) if self._cpu_blocked is None else BLOCKED_WAIT
        self.next_look = min(now + wait, self._waiting_since + self._backstop)
        return None


CREDIT_PERIOD = 60.0
"""Seconds in which a tenant's first calls may take the extra time once."""


class FirstCallCredit:
    """The time that the first calls of each tenant may take beyond the step timeout. Engine thread only.

    A first call often initializes what later calls use: it decodes a vocabulary, for example. All requests wait for it,
    so a tenant with ever new classes gets the extra time once in `CREDIT_PERIOD` (a leaky bucket), and then the step
    timeout.

    Args:
        step_timeout: seconds that any call may take.
        first_step_timeout: seconds that a first call may take.
        clock: returns seconds.
    """

    def __init__(
        self, step_timeout: float, first_step_timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._step_timeout = step_timeout
        self._seconds = max(0.0, first_step_timeout - step_timeout)
        self._clock = clock
        self._used: dict[str, tuple[float, float]] = {}
        """Tenant → (seconds used, at this time)."""

    def remaining(self, tenant: str) -> float:
        """Return the extra seconds that a tenant's next first call may take."""
        used, at = self._used.get(tenant, (0.0, 0.0))
        refilled = (self._clock() - at) * self._seconds / CREDIT_PERIOD
        return max(0.0, min(self._seconds, self._seconds - used + refilled))

    def use(self, tenant: str, seconds: float) -> None:
        """Subtract the time that a first call took beyond the step timeout."""
        extra = seconds - self._step_timeout
        if extra > 0:
            self._used[tenant] = self._seconds - self.remaining(tenant) + extra, self._clock()


LOADING_NICE = 10
"""Nice value while a sandbox is forked and its class loaded: beside a busy core, it gets a tenth of it. The lowest
priority would leave it a hundredth: an honest class would then take ten seconds instead of a tenth of a second to
load."""

DEFERRED_NICE = 19
"""Nice value during a call that no step waits for. There may be many."""

IDLE_AFTER = 0.1
"""Seconds of CPU time after which such a call only gets cores that are idle. Beside a thread with the highest nice
value, one that wakes up may wait for some milliseconds, and the threads of an engine wait for each other all the time:
a call that computes without end would cost most of their speed."""


def lower_priority(pid: int, nice: int) -> None:
    """Give a process, or a thread, this nice value, or the server's own if that is higher."""
    with contextlib.suppress(OSError):  # it has ended
        os.setpriority(os.PRIO_PROCESS, pid, max(nice, _own_nice()))


def run_when_idle(pid: int) -> None:
    """Let a process run only on cores that are idle: the scheduling policy `SCHED_IDLE`."""
    with contextlib.suppress(OSError):  # it has ended
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def restore_priority(pid: int) -> None:
    """Give a process the server's own nice value and the usual scheduling policy again, if that is permitted."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, pid, _own_nice())


def background_cores(num_threads: int) -> frozenset[int]:
    """Return the cores for work in the background: those that the engine's threads leave free, or all if they need all.

    The engine's threads are not bound to the others: Linux moves a thread away from a busy core, to an idle one.

    Args:
        num_threads: number of threads that compute a forward pass.
    """
    cores = sorted(os.sched_getaffinity(0))
    return frozenset(cores[num_threads:] or cores)


def move_to_background(pid: int, cores: Collection[int]) -> None:
    """Let a process, and those that it forks later, run on these cores only, with the nice value `LOADING_NICE`."""
    lower_priority(pid, LOADING_NICE)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(pid, cores)


def leave_background(pid: int) -> None:
    """Give a process the cores of the calling thread, and the server's priority if that is permitted."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(pid, os.sched_getaffinity(0))
    restore_priority(pid)


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
