from __future__ import annotations

import ctypes
import errno
import os
import platform
from pathlib import Path

import pytest

from logitship.sampler.sandbox.kernel.syscalls import MACHINES, NUMBERS, prctl, syscall, this_machine

PR_GET_NAME = 16


@pytest.mark.parametrize("name", MACHINES)
def test_numbers_are_unique(name: str) -> None:
    numbers = list(MACHINES[name].numbers.values())
    assert len(numbers) == len(set(numbers))


def test_newer_calls_have_same_number_on_all_architectures() -> None:
    # Since Linux 5.1, new calls have the same number on all architectures.
    newer = {name: numbers for name, numbers in NUMBERS.items() if max(number or 0 for number in numbers) >= 424}
    assert len(newer) > 5
    assert all(len(set(numbers)) == 1 for numbers in newer.values())


def test_syscall_by_name() -> None:
    assert syscall("getpid") == os.getpid()
    assert syscall("getppid") == os.getppid()
    assert [syscall(name) for name in ("getuid", "geteuid", "getgid", "getegid")] == [
        os.getuid(),
        os.geteuid(),
        os.getgid(),
        os.getegid(),
    ]


def test_integers_are_64_bit(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    try:
        assert syscall("lseek", descriptor, 1 << 40, os.SEEK_SET) == 1 << 40
    finally:
        os.close(descriptor)


def test_buffers_and_strings_are_passed_by_address(tmp_path: Path) -> None:
    buffer = ctypes.create_string_buffer(256)
    length = syscall("getcwd", buffer, len(buffer))
    assert buffer.raw[: length - 1] == os.getcwdb()
    at_working_directory = -100
    target = tmp_path / "file"
    target.write_text("")
    assert syscall("faccessat", at_working_directory, os.fsencode(target), os.R_OK) == 0


def test_error_names_the_call() -> None:
    with pytest.raises(OSError, match="close: Bad file descriptor") as caught:
        syscall("close", -1)
    assert caught.value.errno == errno.EBADF
    with pytest.raises(OSError, match="prctl: Invalid argument"):
        prctl(-1)


def test_prctl_with_address() -> None:
    name = ctypes.create_string_buffer(16)
    assert prctl(PR_GET_NAME, ctypes.addressof(name)) == 0
    assert name.value


def test_unknown_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="need 64-bit Linux on x86_64 or aarch64; this is Linux on riscv64"):
        this_machine.__wrapped__()
