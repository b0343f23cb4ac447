"""System calls that no processor needs, and that have been used to escape from sandboxes, are refused.

Each call has arguments that have no effect, or that the kernel refuses with another errno (EFAULT, EBADF). So EPERM
comes from the filter, not from the system call.
"""

from __future__ import annotations

import errno
import os
import platform
from types import SimpleNamespace
from typing import Any

import pytest

from logitship.sampler.sandbox.kernel import seccomp
from logitship.sampler.sandbox.kernel.syscalls import this_machine

BAD = -1
NULL = 0

# name: number on x86_64, on aarch64, arguments
Call = tuple[str, int, int, tuple[int, ...]]
CALLS: list[Call] = [
    # namespaces, roots and mounts
    ("mount", 165, 40, (NULL, NULL, NULL, 0, NULL)),
    ("unshare", 272, 97, (0,)),
    ("setns", 308, 268, (BAD, 0)),
    ("chroot", 161, 51, (NULL,)),
    ("chdir", 80, 49, (NULL,)),
    ("fchdir", 81, 50, (BAD,)),
    ("name_to_handle_at", 303, 264, (-100, NULL, NULL, NULL, 0)),
    ("listmount", 458, 458, (NULL, NULL, 0, 0)),
    ("statmount", 457, 457, (NULL, NULL, 0, 0)),
    # credentials
    ("setuid", 105, 146, (BAD,)),
    ("setresuid", 117, 147, (BAD, BAD, BAD)),
    ("setresgid", 119, 149, (BAD, BAD, BAD)),
    ("setfsuid", 122, 151, (BAD,)),
    ("capset", 126, 91, (NULL, NULL)),
    ("prctl", 157, 167, (BAD, 0, 0, 0, 0)),
    ("personality", 135, 92, (0xFFFFFFFF,)),
    ("add_key", 248, 217, (NULL, NULL, NULL, 0, 0)),
    ("request_key", 249, 218, (NULL, NULL, NULL, 0)),
    ("keyctl", 250, 219, (0, -4, 0, 0, 0)),
    ("landlock_create_ruleset", 444, 444, (NULL, 0, 1)),
    ("seccomp", 317, 277, (2, 0, NULL)),
    # interfaces that bypass the checks of other calls
    ("io_uring_setup", 425, 425, (1, NULL)),
    ("io_uring_enter", 426, 426, (BAD, 0, 0, 0, NULL, 0)),
    ("io_setup", 206, 0, (1, NULL)),
    ("perf_event_open", 298, 241, (NULL, 0, BAD, BAD, 0)),
    ("vmsplice", 278, 75, (BAD, NULL, 0, 0)),
    ("splice", 275, 76, (BAD, NULL, BAD, NULL, 1, 0)),
    ("copy_file_range", 326, 285, (BAD, NULL, BAD, NULL, 1, 0)),
    ("sendfile", 40, 71, (BAD, BAD, NULL, 1)),
    ("fanotify_mark", 301, 263, (BAD, 0, 0, BAD, NULL)),
    ("inotify_init1", 294, 26, (0,)),
    # new descriptors, and descriptors of other processes
    ("pipe2", 293, 59, (NULL, 0)),
    ("eventfd2", 290, 19, (0, 0)),
    ("epoll_create1", 291, 20, (0,)),
    ("signalfd4", 289, 74, (BAD, NULL, 8, 0)),
    ("timerfd_create", 283, 85, (1, 0)),
    ("memfd_create", 319, 279, (NULL, 0)),
    ("memfd_secret", 447, 447, (BAD,)),
    ("pidfd_open", 434, 434, (1, BAD)),
    ("pidfd_getfd", 438, 438, (BAD, 0, 0)),
    ("dup3", 292, 24, (BAD, BAD, 0)),
    ("flock", 73, 32, (BAD, 0)),
    ("ftruncate", 77, 46, (BAD, 0)),
    ("fallocate", 285, 47, (BAD, 0, 0, 1)),
    ("fsync", 74, 82, (BAD,)),
    ("pwrite64", 18, 68, (BAD, NULL, 0, 0)),
    # communication
    ("socket of IPv6", 41, 198, (10, 1, 0)),
    ("socket of Netlink", 41, 198, (16, 3, 0)),
    ("socket of a virtual machine", 41, 198, (40, 1, 0)),
    ("socket of the crypto interface", 41, 198, (38, 5, 0)),
    ("socket of Bluetooth", 41, 198, (31, 5, 0)),
    ("socketpair", 53, 199, (1, 1, 0, NULL)),
    ("sendto", 44, 206, (BAD, NULL, 0, 0, NULL, 0)),
    ("sendmsg", 46, 211, (BAD, NULL, 0)),
    ("recvmsg", 47, 212, (BAD, NULL, 0)),
    ("recvfrom", 45, 207, (BAD, NULL, 0, 0, NULL, NULL)),
    ("shutdown", 48, 210, (BAD, 0)),
    ("setsockopt", 54, 208, (BAD, 0, 0, NULL, 0)),
    ("getpeername", 52, 205, (BAD, NULL, NULL)),
    ("shmget", 29, 194, (0, 0, 0)),
    ("semget", 64, 190, (0, 0, 0)),
    ("msgget", 68, 186, (0, 0o1000)),
    ("mq_open", 240, 180, (NULL, 0, 0, NULL)),
    # other processes, time, and the rest
    ("ptrace", 101, 117, (0x4200, 0, 0, 0)),
    ("process_vm_readv", 310, 270, (0, NULL, 0, NULL, 0, 1)),
    ("process_vm_writev", 311, 271, (0, NULL, 0, NULL, 0, 1)),
    ("process_madvise", 440, 440, (BAD, NULL, 0, 0, 0)),
    ("kcmp", 312, 272, (BAD, BAD, 99, 0, 0)),
    ("ioprio_set", 251, 30, (99, 0, 0)),
    ("set_mempolicy", 238, 237, (99, NULL, 0)),
    ("mlock", 149, 228, (0, 0)),
    ("msync", 26, 227, (0, 0, 0)),
    ("mincore", 27, 232, (0, 1, NULL)),
    ("pkey_alloc", 330, 289, (BAD, BAD)),
    ("mseal", 462, 462, (0, 0, 1)),
    ("membarrier", 324, 283, (0, 0, 0)),
    ("rseq", 334, 293, (NULL, 0, 0, 0)),
    ("setitimer", 38, 103, (0, NULL, NULL)),
    ("timer_create", 222, 107, (99, NULL, NULL)),
    ("adjtimex", 159, 171, (NULL,)),
    ("setrlimit", 160, 164, (0, NULL)),
    ("sched_setattr", 314, 274, (0, NULL, 0)),
    ("ioctl", 16, 29, (0, 0x5412, NULL)),  # TIOCSTI: type on the terminal
    ("fcntl", 72, 25, (BAD, 1033, 0)),  # F_ADD_SEALS
    ("futex_waitv", 449, 449, (NULL, 0, 0, NULL, 0)),
    ("madvise", 28, 233, (0, 0, 12)),  # MADV_MERGEABLE: merges equal pages of processes
    ("quotactl", 179, 60, (0, NULL, 0, NULL)),
    ("a call that does not exist", 9999, 9999, ()),
]
if os.geteuid() == 0:  # for other users, the kernel refuses these before it checks the arguments
    CALLS += [
        ("bpf", 321, 280, (99, NULL, 0)),
        ("userfaultfd", 323, 282, (BAD,)),
        ("pivot_root", 155, 41, (NULL, NULL)),
        ("umount2", 166, 39, (NULL, 0)),
        ("fsopen", 430, 430, (NULL, 0)),
        ("open_by_handle_at", 304, 265, (BAD, NULL, 0)),
        ("init_module", 175, 105, (NULL, 0, NULL)),
        ("finit_module", 313, 273, (BAD, NULL, 0)),
        ("delete_module", 176, 106, (NULL, 0)),
        ("fanotify_init", 300, 262, (0xFFFFFFFF, 0)),
        ("clock_settime", 227, 112, (99, NULL)),
        ("sethostname", 170, 161, (NULL, BAD)),
        ("setgroups", 116, 159, (BAD, NULL)),
        ("socket of raw packets", 41, 198, (17, 3, 0)),
        ("socket of raw IP", 41, 198, (2, 3, 1)),
        ("syslog", 103, 116, (10, NULL, 0)),
        ("swapon", 167, 224, (NULL, 0)),
        ("reboot", 169, 142, (0, 0, 0, NULL)),
    ]
MACHINE = platform.machine()
HERE = [(name, x86_64 if MACHINE == "x86_64" else aarch64, arguments) for name, x86_64, aarch64, arguments in CALLS]


def call(w: SimpleNamespace) -> int:
    from attacker import kernel

    return kernel(w.number, *w.arguments)


def not_refused(w: SimpleNamespace) -> dict[str | int, int | None]:
    from attacker import kernel

    answers: dict[str | int, int | None] = {}
    for name, number, arguments in w.kernel_calls:
        try:
            kernel(number, *arguments)
        except OSError as error:
            answers[name] = error.errno
        else:
            answers[name] = None
    return {name: answer for name, answer in answers.items() if answer != w.refused}


def test_calls_are_refused(target: Any, sandboxed: Any) -> None:
    report = sandboxed(not_refused, kernel_calls=HERE, refused=errno.EPERM)
    assert report.answer == "returned {}"
    assert target.changes(report) == []


PROBES = {"x86_64": {"uretprobe": 335, "uprobe": 336}}.get(MACHINE, {})
"""Calls that ask no filter: they are for the kernel's own probes, and kill any other process or fail."""


def test_unlisted_numbers_are_refused(target: Any, sandboxed: Any) -> None:
    """Numbers without a name on this machine are refused too: a later kernel may know them."""
    machine = this_machine()
    listed = {machine.numbers[name] for name in seccomp.rules(machine, opens_files=True)}
    numbers = sorted(set(range(600)) - listed - set(PROBES.values()))
    report = sandboxed(not_refused, kernel_calls=[(number, number, [0] * 6) for number in numbers], refused=errno.EPERM)
    not_implemented = dict.fromkeys(sorted([machine.numbers["clone3"], machine.numbers["openat2"]]), errno.ENOSYS)
    assert report.answer == f"returned {not_implemented}"
    assert target.changes(report) == []


@pytest.mark.parametrize("name", PROBES)
def test_calls_of_probes_have_no_effect(name: str, target: Any, sandboxed: Any) -> None:
    report = sandboxed(call, number=PROBES[name], arguments=[0] * 6)
    assert report.kinds == ["crash"] or report.answer in ("EPERM", "ENOSYS", "ENXIO")
    assert target.changes(report) == []


@pytest.mark.parametrize(("name", "number", "arguments"), HERE, ids=[name for name, *_ in HERE])
def test_control_call_reaches_the_kernel(name: str, number: int, arguments: Any, unsandboxed: Any) -> None:
    report = unsandboxed(call, number=number, arguments=arguments)
    assert report.answer.startswith(("E", "returned"))
    assert report.answer != "EPERM"
