from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from logitship.sampler.sandbox.kernel import seccomp
from logitship.sampler.sandbox.kernel.seccomp import ALLOW, KILL_PROCESS, NOT_IMPLEMENTED, NOT_PERMITTED
from logitship.sampler.sandbox.kernel.syscalls import MACHINES, Machine
from tests.sampler.sandbox.kernel.conftest import Run

X86_64, AARCH64 = MACHINES["x86_64"], MACHINES["aarch64"]
I386_ARCHITECTURE = 0x40000003


def interpret(program: bytes, number: int, architecture: int, arguments: Sequence[int]) -> int:
    """Interpret a filter as the kernel does, with `struct seccomp_data` of linux/seccomp.h."""
    data = struct.pack("<iIQ6Q", number, architecture, 0, *arguments)
    position, accumulator = 0, 0
    for _ in range(len(program) // 8):
        code, if_true, if_false, value = struct.unpack_from("<HBBI", program, position * 8)
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x06:
            return int(value)
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            position += if_true if holds else if_false
    raise AssertionError("the program does not return")


def holds(condition: seccomp.Condition, arguments: Sequence[int]) -> bool:
    """Evaluate a condition by its definition."""
    given = arguments[condition.argument]
    if isinstance(condition, seccomp.OneOf):
        return given % 2**32 in condition.values
    if isinstance(condition, seccomp.OnlyBits):
        return given % 2**32 | condition.mask == condition.mask
    return given == 0


def expected(machine: Machine, opens_files: bool, number: int, architecture: int, arguments: Sequence[int]) -> int:
    """Return the expected verdict, computed from the rules."""
    if architecture != machine.audit_arch or (machine is X86_64 and number >= 0x40000000):
        return KILL_PROCESS
    names = [name for name, each in machine.numbers.items() if each == number]
    rules = seccomp.rules(machine, opens_files=opens_files)
    for name in names:
        if name in rules:
            return ALLOW if all(holds(condition, arguments) for condition in rules[name]) else NOT_PERMITTED
        if name in ("clone3", "openat2"):
            return NOT_IMPLEMENTED
    return NOT_PERMITTED


def interesting_words() -> st.SearchStrategy[int]:
    """Argument words: those named by conditions, with high bits set, combinations of flags, and arbitrary ones."""
    named = sorted(
        {
            word
            for machine in MACHINES.values()
            for conditions in seccomp.rules(machine, opens_files=True).values()
            for condition in conditions
            for word in getattr(condition, "values", (getattr(condition, "mask", 0),))
        }
    )
    low = st.sampled_from(named) | st.integers(0, 20) | st.integers(0, 2**32 - 1) | bits()
    return low | st.builds(lambda word, high: word | high << 32, low, st.integers(0, 2**32 - 1))


def bits() -> st.SearchStrategy[int]:
    return st.lists(st.integers(0, 31), max_size=4).map(lambda places: sum({1 << place for place in places}))


NUMBERS = st.integers(0, 600) | st.sampled_from([0x40000000, 0x40000001, 0x40000208, 0x7FFFFFFF])
ARCHITECTURES = st.sampled_from([X86_64.audit_arch, AARCH64.audit_arch, I386_ARCHITECTURE])
ARGUMENTS = st.lists(interesting_words(), min_size=6, max_size=6)


@pytest.mark.parametrize("opens_files", [True, False])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
@given(st.data())
def test_program_agrees_with_rules(machine: Machine, opens_files: bool, data: st.DataObject) -> None:
    program = seccomp.filter_program(machine, opens_files=opens_files)
    conditional = [name for name, conditions in seccomp.rules(machine, opens_files=True).items() if conditions]
    known = st.sampled_from(sorted(machine.numbers.values()))
    with_conditions = st.sampled_from([machine.numbers[name] for name in conditional])
    for _ in range(5):
        number = data.draw(known | with_conditions | NUMBERS)
        architecture = data.draw(st.just(machine.audit_arch) | ARCHITECTURES)
        arguments = data.draw(ARGUMENTS)
        assert interpret(program, number, architecture, arguments) == expected(
            machine, opens_files, number, architecture, arguments
        )


@given(st.integers(0, 2**64 - 1))
@example(0)
@example(1 << 32)
def test_null_pointer_condition(word: int) -> None:
    program = seccomp.filter_program(X86_64, opens_files=False)
    verdict = interpret(program, X86_64.numbers["prlimit64"], X86_64.audit_arch, [0, 7, word, 0, 0, 0])
    assert verdict == (ALLOW if word == 0 else NOT_PERMITTED)


def verdict(machine: Machine, name: str, *arguments: int, opens_files: bool = True) -> int:
    program = seccomp.filter_program(machine, opens_files=opens_files)
    words = [word % 2**64 for word in (*arguments, 0, 0, 0, 0, 0, 0)[:6]]
    return interpret(program, machine.numbers[name], machine.audit_arch, words)


REFUSED = (
    *("bpf", "capset", "clone", "connect", "execve", "io_uring_setup", "kill", "memfd_create", "mount", "pivot_root"),
    *("process_vm_readv", "ptrace", "seccomp", "setuid", "socket", "umount2", "unshare", "close_range"),
)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
@pytest.mark.parametrize("name", REFUSED)
def test_dangerous_calls_are_refused(machine: Machine, name: str) -> None:
    assert verdict(machine, name) == NOT_PERMITTED


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
@pytest.mark.parametrize(
    "name", ["read", "write", "mmap", "munmap", "futex", "exit_group", "getrandom", "rt_sigreturn"]
)
def test_calls_of_computations_are_allowed(machine: Machine, name: str) -> None:
    assert verdict(machine, name) == ALLOW


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
def test_files_are_opened_read_only_if_opens_files(machine: Machine) -> None:
    current_directory = -100
    assert verdict(machine, "openat", current_directory, 0, os.O_RDONLY | os.O_CLOEXEC) == ALLOW
    for flags in (
        os.O_WRONLY,
        os.O_RDWR,
        os.O_CREAT,
        os.O_TRUNC,
        os.O_APPEND,
        os.O_PATH,
        os.O_TMPFILE & ~os.O_DIRECTORY,
    ):
        assert verdict(machine, "openat", current_directory, 0, flags) == NOT_PERMITTED
    for name in ("openat", "newfstatat", "statx", "readlinkat", "faccessat"):
        assert verdict(machine, name, opens_files=False) == NOT_PERMITTED


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
def test_fcntl_cannot_send_signals(machine: Machine) -> None:
    assert verdict(machine, "fcntl", 3, fcntl.F_GETFL) == ALLOW
    for command in (fcntl.F_SETOWN, fcntl.F_SETSIG, fcntl.F_SETFL, fcntl.F_SETLEASE, fcntl.F_NOTIFY, 15):
        assert verdict(machine, "fcntl", 3, command) == NOT_PERMITTED
        assert verdict(machine, "fcntl", 3, command | 1 << 40) == NOT_PERMITTED


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
def test_other_processes_cannot_be_queried(machine: Machine) -> None:
    cpu_clock_of_process = ~1234 << 3 | 2
    assert verdict(machine, "clock_gettime", 1) == ALLOW
    assert verdict(machine, "clock_gettime", cpu_clock_of_process) == NOT_PERMITTED
    assert verdict(machine, "prlimit64", 1234, 7, 0) == NOT_PERMITTED
    assert verdict(machine, "sched_getaffinity", 1234) == NOT_PERMITTED
    mergeable = 12
    assert verdict(machine, "madvise", 0, 4096, mergeable) == NOT_PERMITTED


def test_missing_call_of_an_architecture_is_skipped() -> None:
    assert "open" in seccomp.rules(X86_64, opens_files=True)
    assert "open" not in seccomp.rules(AARCH64, opens_files=True)


@pytest.mark.parametrize("opens_files", [True, False])
def test_unlisted_calls_fail_in_the_kernel(run_plan: Run, opens_files: bool) -> None:
    outcome = run_plan("unlisted_system_calls", opens_files, landlock_abi=None if opens_files else 0)
    machine = MACHINES[os.uname().machine]
    not_implemented = sorted([machine.numbers["clone3"], machine.numbers["openat2"]])
    assert outcome.result == [[number, errno.ENOSYS] for number in not_implemented]


def test_foreign_abi_kills_the_process(run_plan: Run) -> None:
    assert run_plan("end_by", "foreign ABI").status == -31  # SIGSYS


def test_this_kernel_has_filters() -> None:
    assert seccomp.available()


def test_filter_is_tried_where_the_kernel_does_not_say(run_plan: Run, nobody: bool) -> None:
    outcome = run_plan("filters_are_available", where="plain", nobody=nobody, like_gvisor=True)
    assert outcome.result is True


@pytest.mark.parametrize("effect", ["nothing", "refuses", "kills"])
def test_tried_filter_must_refuse_and_kill(run_plan: Run, effect: str) -> None:
    outcome = run_plan("trial_of_a_filter", effect, where="plain", deny={"seccomp": errno.EINVAL})
    assert outcome.result is False


@pytest.mark.parametrize("answer", [errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_other_refusals_mean_no_filters(run_plan: Run, answer: int) -> None:
    outcome = run_plan("filters_are_available", where="plain", deny={"seccomp": answer})
    assert outcome.result is False


def test_filters_that_cannot_be_installed_are_not_available(run_plan: Run) -> None:
    plan: dict[str, Any] = {"deny": {"seccomp": errno.EINVAL}, "deny_if": {"prctl": (0, 22)}}
    assert run_plan("filters_are_available", where="plain", **plan).result is False
