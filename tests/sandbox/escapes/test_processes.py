"""A processor cannot start processes or threads, and cannot signal, trace or inspect others."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

HIDDEN = "ENOENT|EACCES|EPERM"
"""The path does not exist in a private root directory; otherwise, Landlock denies access."""


# Signals


def kill(w: SimpleNamespace) -> None:
    import os

    os.kill(w.victim, 15)


def signal_the_server(w: SimpleNamespace) -> None:
    import os
    import signal

    os.kill(w.server, signal.SIGUSR1)


def kill_the_thread(w: SimpleNamespace) -> None:
    from attacker import kernel

    kernel({"x86_64": 234, "aarch64": 131}, w.victim, w.victim, 9)


def kill_by_old_call(w: SimpleNamespace) -> None:
    from attacker import kernel

    kernel({"x86_64": 200, "aarch64": 130}, w.victim, 9)


def queue_a_signal(w: SimpleNamespace) -> None:
    import ctypes

    from attacker import kernel

    information = (ctypes.c_int * 32)(15, 0, -1)
    kernel({"x86_64": 129, "aarch64": 138}, w.victim, 15, information)


def kill_by_descriptor(w: SimpleNamespace) -> None:
    import os
    import signal

    signal.pidfd_send_signal(os.pidfd_open(w.victim), 9)


def kill_by_owning_a_socket(w: SimpleNamespace) -> None:
    """Make the victim the socket's owner, which gets a signal of our choice when data arrives."""
    import fcntl
    import os
    import signal

    from attacker import sockets

    for descriptor in sockets():
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, w.victim)
        fcntl.fcntl(descriptor, 10, signal.SIGKILL)  # F_SETSIG
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.write(sockets()[0], b"x")


def kill_by_owning_a_socket_ex(w: SimpleNamespace) -> None:
    import ctypes
    import fcntl

    from attacker import kernel, sockets

    owner = (ctypes.c_int * 2)(1, w.victim)  # F_OWNER_PID
    for descriptor in sockets():
        kernel({"x86_64": 72, "aarch64": 25}, descriptor, 15, owner)  # F_SETOWN_EX
        fcntl.fcntl(descriptor, 10, 9)


def signal_all_processes(w: SimpleNamespace) -> None:
    import os

    os.kill(-1, 0)


def signal_the_parent(w: SimpleNamespace) -> None:
    import os

    os.kill(os.getppid(), 0)


def signal_the_group(w: SimpleNamespace) -> None:
    import os

    os.kill(0, 0)


# Inspecting and changing other processes


def trace(w: SimpleNamespace) -> None:
    from attacker import kernel

    kernel({"x86_64": 101, "aarch64": 117}, 0x4206, w.victim, 0, 0)  # PTRACE_SEIZE


def read_memory(w: SimpleNamespace) -> bytes:
    import ctypes

    from attacker import kernel

    mine = ctypes.create_string_buffer(60)
    here = (ctypes.c_size_t * 2)(ctypes.addressof(mine), 60)
    there = (ctypes.c_size_t * 2)(w.secret_at, 60)
    kernel({"x86_64": 310, "aarch64": 270}, w.victim, here, 1, there, 1, 0)
    return mine.value


def read_memory_as_a_file(w: SimpleNamespace) -> bytes:
    import os

    return os.pread(os.open(f"/proc/{w.victim}/mem", os.O_RDONLY), 60, w.secret_at)


def take_a_descriptor(w: SimpleNamespace) -> bytes:
    import os

    from attacker import kernel

    return os.pread(kernel(438, os.pidfd_open(w.victim), w.secret_descriptor, 0), 100, 0)


def take_a_descriptor_as_a_file(w: SimpleNamespace) -> str:
    return open(f"/proc/{w.victim}/fd/{w.secret_descriptor}").read()


def environment(w: SimpleNamespace) -> bytes:
    return open(f"/proc/{w.victim}/environ", "rb").read()


def command_line(w: SimpleNamespace) -> bytes:
    return open(f"/proc/{w.victim}/cmdline", "rb").read()


def environment_of_the_server(w: SimpleNamespace) -> bytes:
    return open(f"/proc/{w.server}/environ", "rb").read()


def memory_map_of_the_server(w: SimpleNamespace) -> bytes:
    return open(f"/proc/{w.server}/maps", "rb").read()


def list_of_processes(w: SimpleNamespace) -> str:
    import os

    return " ".join(f"process-{each}-" for each in os.listdir("/proc") if each.isdigit())[-2000:]


def change_nice_value_of_others(w: SimpleNamespace) -> None:
    import os

    os.setpriority(os.PRIO_PROCESS, w.victim, 19)


def pin_others(w: SimpleNamespace) -> None:
    import os

    os.sched_setaffinity(w.victim, {0})


def schedule_others(w: SimpleNamespace) -> None:
    import os

    os.sched_setscheduler(w.victim, os.SCHED_BATCH, os.sched_param(0))


def limit_others(w: SimpleNamespace) -> None:
    import resource

    resource.prlimit(w.victim, resource.RLIMIT_NOFILE, (8, 8))


def limits_of_others(w: SimpleNamespace) -> object:
    import resource

    return resource.prlimit(w.victim, resource.RLIMIT_NOFILE)


def cpu_time_of_others(w: SimpleNamespace) -> object:
    import time

    return time.clock_gettime(~w.victim << 3 | 2)


def group_of_others(w: SimpleNamespace) -> object:
    import os

    return os.getpgid(w.victim)


# Starting processes and threads. They keep running, so that they can be detected.


def fork(w: SimpleNamespace) -> None:
    import os
    import signal

    if os.fork() == 0:
        signal.pause()


def vfork(w: SimpleNamespace) -> None:
    """Fork with the clone system call."""
    import os
    import signal

    from attacker import kernel

    if kernel({"x86_64": 56, "aarch64": 220}, 17, 0, 0, 0, 0) == 0:  # clone(SIGCHLD)
        signal.pause()
        os._exit(0)


def fork_by_new_call(w: SimpleNamespace) -> None:
    import ctypes
    import signal

    from attacker import kernel

    arguments = (ctypes.c_uint64 * 8)(0, 0, 0, 0, 17)
    if kernel(435, arguments, 64) == 0:
        signal.pause()


def thread(w: SimpleNamespace) -> None:
    import threading
    import time

    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def thread_of_the_library(w: SimpleNamespace) -> None:
    import ctypes
    import os

    libc = ctypes.CDLL(None)
    number = libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.sleep, ctypes.c_void_p(60))
    if number:
        raise OSError(number, os.strerror(number))


def threads_of_torch(w: SimpleNamespace) -> str:
    import torch

    torch.set_num_threads(4)
    return str((torch.ones(1 << 20) + 1).sum().item())


def subprocess_with_a_shell(w: SimpleNamespace) -> None:
    import subprocess

    subprocess.run(f"touch {w.folder}/new", shell=True)


def spawn(w: SimpleNamespace) -> None:
    import os

    os.waitpid(os.posix_spawn("/bin/sh", ["sh", "-c", f"touch {w.folder}/new"], {"PATH": "/usr/bin:/bin"}), 0)


def system(w: SimpleNamespace) -> int:
    import os

    return os.system(f"touch {w.folder}/new")


def execute(w: SimpleNamespace) -> None:
    import os

    os.execv("/bin/sh", ["sh", "-c", f"touch {w.folder}/new"])


def execute_from_memory(w: SimpleNamespace) -> None:
    import os

    program = os.memfd_create("program", os.MFD_CLOEXEC)
    with open("/bin/sh", "rb") as file:
        os.write(program, file.read())
    os.execve(program, ["sh", "-c", f"touch {w.folder}/new"], {"PATH": "/usr/bin:/bin"})


def memory_file(w: SimpleNamespace) -> int:
    import os

    return os.memfd_create("program", 0)


def pool(w: SimpleNamespace) -> None:
    import multiprocessing
    import sys

    sys.pool = multiprocessing.get_context("fork").Pool(1)


def terminal(w: SimpleNamespace) -> None:
    import pty
    import signal

    if pty.fork()[0] == 0:
        signal.pause()


def fork_bomb(w: SimpleNamespace) -> str:
    import os
    import signal

    refused = 0
    for _ in range(50):
        try:
            if os.fork() == 0:
                signal.pause()
        except PermissionError:
            refused += 1
    return f"{refused} refused"


def thread_bomb(w: SimpleNamespace) -> str:
    import _thread
    import time

    refused = 0
    for _ in range(50):
        try:
            _thread.start_new_thread(time.sleep, (60,))
        except RuntimeError:
            refused += 1
    return f"{refused} refused"


EXITED = "changed: the victim exited"
SECRET = "the secret leaked"
NEW_FILE = "changed: new"
PROCESS = "started: process .*"
THREAD = "started: thread .*"
ATTACKS: list[Any] = [
    # attempt, refusal, change seen in the control (None: not visible from outside, but not refused either)
    (kill, "EPERM", EXITED),
    (signal_the_server, "EPERM", "the server was signalled"),
    (kill_the_thread, "EPERM", EXITED),
    (kill_by_old_call, "EPERM", EXITED),
    (queue_a_signal, "EPERM", EXITED),
    (kill_by_descriptor, "EPERM", EXITED),
    (kill_by_owning_a_socket, "EPERM", EXITED),
    (kill_by_owning_a_socket_ex, "EPERM", None),
    (signal_all_processes, "EPERM", None),
    (signal_the_parent, "EPERM", None),
    (signal_the_group, "EPERM", None),
    (trace, "EPERM", "changed: the victim's tracer"),
    (read_memory, "EPERM", SECRET),
    (read_memory_as_a_file, HIDDEN, SECRET),
    (take_a_descriptor, "EPERM", SECRET),
    (take_a_descriptor_as_a_file, HIDDEN, SECRET),
    (environment, HIDDEN, SECRET),
    (command_line, HIDDEN, SECRET),
    (environment_of_the_server, HIDDEN, None),
    (memory_map_of_the_server, HIDDEN, None),
    (list_of_processes, HIDDEN, "PIDs leaked"),
    (change_nice_value_of_others, "EPERM", "changed: the victim's nice value"),
    (pin_others, "EPERM", "changed: the victim's affinity"),
    (schedule_others, "EPERM", "changed: the victim's scheduling"),
    (limit_others, "EPERM", "changed: the victim's limits"),
    (limits_of_others, "EPERM", None),
    (cpu_time_of_others, "EPERM", None),
    (group_of_others, "EPERM", None),
    (fork, "EPERM", PROCESS),
    (vfork, "EPERM", PROCESS),
    (fork_by_new_call, "ENOSYS", PROCESS),
    (thread, "RuntimeError: can't start new thread", THREAD),
    (thread_of_the_library, "EPERM", THREAD),
    (threads_of_torch, "returned .*", THREAD),
    (subprocess_with_a_shell, "EPERM", NEW_FILE),
    (spawn, "EPERM|EACCES|ENOENT", NEW_FILE),
    (system, "returned (-1|256|32512)", NEW_FILE),
    (execute, "EPERM", NEW_FILE),
    (execute_from_memory, "EPERM", NEW_FILE),
    (memory_file, "EPERM", None),
    (pool, "EPERM", PROCESS),
    (terminal, "EPERM|OSError: out of pty devices", PROCESS),
    (fork_bomb, "returned '50 refused'", PROCESS),
    (thread_bomb, "returned '50 refused'", THREAD),
]


def name_of(value: Any) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("attempt", "refusal", "change"), ATTACKS, ids=name_of)
def test_no_process_is_affected_or_started(
    attempt: Any, refusal: str, change: Any, target: Any, sandboxed: Any
) -> None:
    report = sandboxed(attempt)
    assert re.fullmatch(refusal, report.answer)
    assert target.changes(report) == []


@pytest.mark.parametrize(("attempt", "refusal", "change"), ATTACKS, ids=name_of)
def test_control_processes_are_affected_or_started(
    attempt: Any, refusal: str, change: Any, target: Any, unsandboxed: Any
) -> None:
    report = unsandboxed(attempt)
    if change is None:
        assert not re.fullmatch(refusal, report.answer, re.DOTALL)
    else:
        assert any(re.fullmatch(change, each) for each in target.changes_until(change, report))
