"""A processor cannot read files of the server, discover paths, or change anything."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace
from typing import Any

import pytest

HIDDEN = "ENOENT|EACCES|EPERM"
"""The path does not exist in a private root directory; otherwise, Landlock denies access."""


# Reading


def plain_open(w: SimpleNamespace) -> str:
    return open(w.secret_file).read()


def low_level_open(w: SimpleNamespace) -> bytes:
    import os

    return os.read(os.open(w.secret_file, os.O_RDONLY | os.O_NOFOLLOW), 100)


def open_by_old_call(w: SimpleNamespace) -> bytes:
    import os

    from attacker import kernel

    numbers = {"x86_64": (2, w.secret_file.encode(), 0), "aarch64": (56, -100, w.secret_file.encode(), 0)}
    return os.read(kernel(*numbers[os.uname().machine]), 100)


def open_by_new_call(w: SimpleNamespace) -> bytes:
    import ctypes
    import os

    from attacker import kernel

    how = (ctypes.c_uint64 * 3)(0, 0, 0)
    return os.read(kernel(437, -100, w.secret_file.encode(), how, 24), 100)


def open_through_libc(w: SimpleNamespace) -> bytes:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.fopen.restype = ctypes.c_void_p
    file = libc.fopen(w.secret_file.encode(), b"r")
    if not file:
        raise OSError(ctypes.get_errno(), "fopen")
    text = ctypes.create_string_buffer(100)
    libc.fgets(text, 100, ctypes.c_void_p(file))
    return text.value


def open_as_code(w: SimpleNamespace) -> bytes:
    import io

    return io.open_code(w.secret_file).read()


def open_with_a_codec(w: SimpleNamespace) -> str:
    import codecs

    return codecs.open(w.secret_file, encoding="utf-8").read()


def through_a_loader(w: SimpleNamespace) -> bytes:
    from importlib.machinery import SourceFileLoader

    return SourceFileLoader("secret", w.secret_file).get_data(w.secret_file)


def through_own_process(w: SimpleNamespace) -> str:
    return open(f"/proc/self/root{w.secret_file}").read()


def through_the_parent(w: SimpleNamespace) -> str:
    import os

    return open(f"/proc/{os.getppid()}/root{w.secret_file}").read()


def through_parent_directories(w: SimpleNamespace) -> str:
    import os

    return open(f"{os.path.dirname(os.__file__)}{'/..' * 40}{w.secret_file}").read()


def through_a_traceback(w: SimpleNamespace) -> str:
    import traceback

    try:
        exec(compile("1 / 0", w.secret_file, "exec"))
    except ZeroDivisionError:
        shown = traceback.format_exc()
    assert "secret.txt" in shown
    return shown


def mapped_by_numpy(w: SimpleNamespace) -> bytes:
    import numpy

    return bytes(numpy.memmap(w.secret_file, mode="r"))


def read_by_numpy(w: SimpleNamespace) -> bytes:
    import numpy

    return bytes(numpy.fromfile(w.secret_file, dtype=numpy.uint8))


def parsed_by_numpy(w: SimpleNamespace) -> object:
    import numpy

    return numpy.genfromtxt(w.secret_file, dtype=str, comments=None)


def read_by_torch(w: SimpleNamespace) -> object:
    import torch

    return torch.load(w.secret_tensor, weights_only=False)


def mapped_by_torch(w: SimpleNamespace) -> bytes:
    import torch

    return bytes(torch.from_file(w.secret_file, shared=False, size=41, dtype=torch.uint8).tolist())


def mapped_as_storage(w: SimpleNamespace) -> bytes:
    import torch

    return bytes(torch.UntypedStorage.from_file(w.secret_file, False, 41))


def read_by_torch_script(w: SimpleNamespace) -> bytes:
    import torch

    return torch._C.PyTorchFileReader(w.secret_tensor).get_record("data.pkl")


def imported(w: SimpleNamespace) -> str:
    import sys

    sys.path.insert(0, w.folder)
    import canary

    return canary.KEY


def loaded_as_a_library(w: SimpleNamespace) -> str:
    import ctypes

    return ctypes.CDLL(w.library)._name


def loaded_as_a_library_of_torch(w: SimpleNamespace) -> str:
    import torch

    torch.ops.load_library(w.library)
    return "loaded"


def loaded_as_classes_of_torch(w: SimpleNamespace) -> str:
    import torch

    torch.classes.load_library(w.library)
    return "loaded"


def listing(w: SimpleNamespace) -> list[str]:
    import os

    return os.listdir(w.inner)


def listing_of_everything(w: SimpleNamespace) -> str:
    import os

    return f"{os.listdir(w.inner)} {sorted(os.listdir('/tmp'))}"  # the secret first, because reports are truncated


def target_of_a_link(w: SimpleNamespace) -> str:
    import os

    return os.readlink(f"{w.folder}/link")


def times(w: SimpleNamespace) -> int:
    import os

    return os.stat(w.plain_file).st_mtime_ns


def times_by_statx(w: SimpleNamespace) -> int:
    import ctypes

    from attacker import kernel

    found = ctypes.create_string_buffer(256)
    kernel({"x86_64": 332, "aarch64": 291}, -100, w.plain_file.encode(), 0, 0xFFF, found)
    return int.from_bytes(found[0x70:0x78], "little") * 10**9 + int.from_bytes(found[0x78:0x7C], "little")


def extended_attributes(w: SimpleNamespace) -> object:
    import os

    return os.listxattr(w.plain_file)


def space_of_the_disk(w: SimpleNamespace) -> object:
    import os

    return os.statvfs("/").f_bfree


SECRET = "the secret leaked"
TIMES = "file times leaked"
READERS: list[Any] = [
    (plain_open, HIDDEN, SECRET),
    (low_level_open, HIDDEN, SECRET),
    (open_by_old_call, HIDDEN, SECRET),
    (open_by_new_call, "ENOSYS", SECRET),
    (open_through_libc, HIDDEN, SECRET),
    (open_as_code, HIDDEN, SECRET),
    (open_with_a_codec, HIDDEN, SECRET),
    (through_a_loader, HIDDEN, SECRET),
    (through_own_process, HIDDEN, SECRET),
    (through_the_parent, HIDDEN, SECRET),
    (through_parent_directories, HIDDEN, SECRET),
    (through_a_traceback, "returned .*", SECRET),
    (mapped_by_numpy, HIDDEN, SECRET),
    (read_by_numpy, HIDDEN, SECRET),
    (parsed_by_numpy, rf"{HIDDEN}|FileNotFoundError: .* not found\.", SECRET),
    (read_by_torch, HIDDEN, SECRET),
    (mapped_by_torch, "RuntimeError: unable to open file .*", SECRET),
    (mapped_as_storage, "RuntimeError: unable to open file .*", SECRET),
    (read_by_torch_script, "RuntimeError: .*open.*", None),
    (imported, "ModuleNotFoundError: No module named 'canary'", SECRET),
    (loaded_as_a_library, "OSError: .*cannot open shared object file.*", None),
    (loaded_as_a_library_of_torch, "OSError: (Could not load this library|.*cannot open).*", None),
    (loaded_as_classes_of_torch, "OSError: (Could not load this library|.*cannot open).*", None),
    (listing, HIDDEN, SECRET),
    (listing_of_everything, HIDDEN, SECRET),
    (target_of_a_link, HIDDEN, SECRET),
    (times, HIDDEN, TIMES),
    (times_by_statx, HIDDEN, TIMES),
    (extended_attributes, "EPERM", None),
    (space_of_the_disk, "EPERM", None),
]


# Writing


def overwrite(w: SimpleNamespace) -> None:
    with open(w.plain_file, "w") as file:
        file.write("mine")


def append(w: SimpleNamespace) -> None:
    with open(w.plain_file, "a") as file:
        file.write("mine")


def write_in_place(w: SimpleNamespace) -> None:
    with open(w.plain_file, "r+b") as file:
        file.write(b"mine")


def create(w: SimpleNamespace) -> None:
    with open(f"{w.folder}/new", "x") as file:
        file.write("mine")


def create_by_old_call(w: SimpleNamespace) -> None:
    import os

    from attacker import kernel

    path = f"{w.folder}/new".encode()
    numbers = {"x86_64": (85, path, 0o777), "aarch64": (56, -100, path, 0o101, 0o777)}
    kernel(*numbers[os.uname().machine])


def create_through_libc(w: SimpleNamespace) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.fopen.restype = ctypes.c_void_p
    if not libc.fopen(f"{w.folder}/new".encode(), b"w"):
        raise OSError(ctypes.get_errno(), "fopen")


def create_without_a_name(w: SimpleNamespace) -> int:
    import os

    return os.open(w.folder, os.O_TMPFILE | os.O_RDWR)


def truncate(w: SimpleNamespace) -> None:
    import os

    os.truncate(w.plain_file, 0)


def truncate_by_opening(w: SimpleNamespace) -> None:
    import os

    os.open(w.plain_file, os.O_RDONLY | os.O_TRUNC)


def unlink(w: SimpleNamespace) -> None:
    import os

    os.unlink(w.plain_file)


def rename(w: SimpleNamespace) -> None:
    import os

    os.rename(w.plain_file, f"{w.folder}/other")


def hard_link(w: SimpleNamespace) -> None:
    import os

    os.link(w.plain_file, f"{w.folder}/other")


def symbolic_link(w: SimpleNamespace) -> None:
    import os

    os.symlink("/etc/passwd", f"{w.folder}/other")


def make_a_folder(w: SimpleNamespace) -> None:
    import os

    os.mkdir(f"{w.folder}/other")


def make_a_pipe(w: SimpleNamespace) -> None:
    import os

    os.mkfifo(f"{w.folder}/other")


def change_the_mode(w: SimpleNamespace) -> None:
    import os

    os.chmod(w.plain_file, 0o600)


def change_the_mode_by_new_call(w: SimpleNamespace) -> None:
    from attacker import kernel

    kernel(452, -100, w.plain_file.encode(), 0o600, 0)


def change_the_owner(w: SimpleNamespace) -> None:
    import os

    os.chown(w.plain_file, 12345, -1)


def change_the_times(w: SimpleNamespace) -> None:
    import os

    os.utime(w.plain_file, (1, 1))


def set_an_attribute(w: SimpleNamespace) -> None:
    import os

    os.setxattr(w.plain_file, "user.mine", b"mine")


def temporary_file(w: SimpleNamespace) -> None:
    import tempfile

    tempfile.mkstemp(dir=w.folder)


def saved_by_numpy(w: SimpleNamespace) -> None:
    import numpy

    numpy.save(f"{w.folder}/new", numpy.ones(3))


def mapped_for_writing(w: SimpleNamespace) -> None:
    import numpy

    numpy.memmap(w.plain_file, mode="r+")[:4] = 65


def saved_by_torch(w: SimpleNamespace) -> None:
    import torch

    torch.save(torch.ones(3), f"{w.folder}/new.pt")


def mapped_for_writing_by_torch(w: SimpleNamespace) -> None:
    import torch

    torch.from_file(w.plain_file, shared=True, size=4, dtype=torch.uint8).fill_(65)


def database(w: SimpleNamespace) -> None:
    import sqlite3

    sqlite3.connect(f"{w.folder}/new.db").execute("create table mine (x)")


def copied_by_the_kernel(w: SimpleNamespace) -> None:
    import os
    import shutil

    shutil.copyfile(os.__file__, f"{w.folder}/new")


def shared_memory_file(w: SimpleNamespace) -> None:
    with open(w.shared_memory, "w") as file:
        file.write("mine")


def shared_memory_block(w: SimpleNamespace) -> None:
    from multiprocessing import resource_tracker, shared_memory

    resource_tracker.register = lambda *_: None
    shared_memory.SharedMemory(w.shared_memory.removeprefix("/dev/shm/"), create=True, size=100)


def shared_memory_of_a_tensor(w: SimpleNamespace) -> str:
    import torch

    return str(torch.ones(3).share_memory_().is_shared())


def library_in_the_installation(w: SimpleNamespace) -> None:
    import os

    os.unlink(f"{os.path.dirname(os.__file__)}/no-such-file-{os.path.basename(w.folder)}")


WRITERS: list[Any] = [
    (overwrite, "EPERM", "changed: plain.txt"),
    (append, "EPERM", "changed: plain.txt"),
    (write_in_place, "EPERM", "changed: plain.txt"),
    (create, "EPERM", "changed: new"),
    (create_by_old_call, "EPERM", "changed: new"),
    (create_through_libc, "EPERM", "changed: new"),
    (create_without_a_name, "EPERM", None),
    (truncate, "EPERM", "changed: plain.txt"),
    (truncate_by_opening, "EPERM", "changed: plain.txt"),
    (unlink, "EPERM", "changed: plain.txt"),
    (rename, "EPERM", "changed: other"),
    (hard_link, "EPERM", "changed: other"),
    (symbolic_link, "EPERM", "changed: other"),
    (make_a_folder, "EPERM", "changed: other"),
    (make_a_pipe, "EPERM", "changed: other"),
    (change_the_mode, "EPERM", "changed: plain.txt"),
    (change_the_mode_by_new_call, "EPERM", "changed: plain.txt"),
    (change_the_times, "EPERM", "changed: plain.txt"),
    (set_an_attribute, "EPERM", None),
    (temporary_file, "EPERM", "changed: tmp.*"),
    (saved_by_numpy, "EPERM", "changed: new.npy"),
    (mapped_for_writing, "EPERM", "changed: plain.txt"),
    (saved_by_torch, "RuntimeError: .*", "changed: new.pt"),
    (mapped_for_writing_by_torch, "RuntimeError: unable to open file .*", "changed: plain.txt"),
    (database, "OperationalError: unable to open database file", "changed: new.db"),
    (copied_by_the_kernel, "EPERM", "changed: new"),
    (shared_memory_file, "EPERM", "changed: /dev/shm"),
    (shared_memory_block, "EPERM", "changed: /dev/shm"),
    (shared_memory_of_a_tensor, "RuntimeError: .*", None),
    (library_in_the_installation, "EPERM", None),
]
if os.geteuid() == 0:  # in the control, chown needs root
    WRITERS.append((change_the_owner, "EPERM", "changed: plain.txt"))

ATTACKS = READERS + WRITERS


def name_of(value: Any) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("attempt", "refusal", "change"), ATTACKS, ids=name_of)
def test_files_cannot_be_read_or_written(attempt: Any, refusal: str, change: Any, target: Any, sandboxed: Any) -> None:
    report = sandboxed(attempt)
    assert re.fullmatch(refusal, report.answer, re.DOTALL)
    assert target.changes(report) == []


@pytest.mark.parametrize(("attempt", "refusal", "change"), ATTACKS, ids=name_of)
def test_control_reads_or_writes_files(attempt: Any, refusal: str, change: Any, target: Any, unsandboxed: Any) -> None:
    report = unsandboxed(attempt)
    if change is None:  # not visible from outside: check that the kernel does not refuse it
        assert not re.fullmatch(refusal, report.answer, re.DOTALL)
    else:
        assert any(re.fullmatch(change, each) for each in target.changes_until(change, report))
