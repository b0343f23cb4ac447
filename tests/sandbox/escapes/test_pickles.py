"""A malicious pickle has no effect, because it is unpickled in a sandbox."""

from __future__ import annotations

import builtins
import os
import pickle
import re
import subprocess
from collections.abc import Callable
from typing import Any

import dill
import pytest

from logitship.client.serialization.processor_string import PickledProcessor, SourceProcessor


class Call:
    """An object whose unpickling calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


def by_name(module: str, name: str, *arguments: Any) -> bytes:
    """Return a pickle like that of `Call`, for the function `name` (a dotted path) of `module`."""
    names = b"".join(b"\x8c" + bytes([len(each)]) + each.encode() for each in (module, name))
    return b"\x80\x04" + names + b"\x93" + pickle.dumps(arguments, 2)[2:-1] + b"R."


def command(w: Any) -> str:
    return f"touch {w.folder}/new"


def python(w: Any) -> str:
    return f"open({str(w.folder / 'new')!r}, 'x')"


def own_function(w: Any) -> bytes:
    path = str(w.folder / "new")
    return bytes(dill.dumps(Call(lambda: __import__("os").mkdir(path)), recurse=True))


REFUSED = ".*PermissionError.*"
"""The error of the attempt itself, so it was made."""

PAYLOADS: dict[str, tuple[Callable[[Any], bytes], str]] = {
    # description: the pickle, and the client's error message
    "os.system": (lambda w: pickle.dumps(Call(os.system, command(w))), "the processor is not a class but int"),
    "os.system of another module": (
        lambda w: by_name("shutil", "os.system", command(w)),
        "the processor is not a class but int",
    ),
    "subprocess": (lambda w: pickle.dumps(Call(subprocess.Popen, command(w).split())), REFUSED),
    "spawn": (lambda w: by_name("os", "posix_spawn", "/bin/sh", ["sh", "-c", command(w)], {}), ".*Error.*"),
    "exec": (lambda w: pickle.dumps(Call(exec, python(w))), REFUSED),
    "eval": (lambda w: pickle.dumps(Call(eval, python(w))), REFUSED),
    "open": (lambda w: pickle.dumps(Call(builtins.open, str(w.folder / "new"), "x")), REFUSED),
    "a folder": (lambda w: pickle.dumps(Call(os.mkdir, str(w.folder / "new"))), REFUSED),
    "a function of its own": (own_function, REFUSED),
    "a pickle in a pickle": (lambda w: pickle.dumps(Call(pickle.loads, pickle.dumps(Call(exec, python(w))))), REFUSED),
    "timeit": (lambda w: by_name("timeit", "timeit", python(w)), REFUSED),
    "numpy": (lambda w: by_name("numpy", "save", str(w.folder / "new"), [1]), REFUSED),
    "torch": (lambda w: by_name("torch", "save", [1], str(w.folder / "new")), ".*RuntimeError.*"),
    "a library": (lambda w: by_name("ctypes", "CDLL", str(w.plain_file)), ".*OSError.*"),
}


@pytest.mark.parametrize("name", PAYLOADS)
def test_unpickling_has_no_effect(name: str, target: Any, sandboxed: Any) -> None:
    make, message = PAYLOADS[name]
    report = sandboxed.run(PickledProcessor(make(target)))
    assert re.fullmatch(message, report.load_error, re.DOTALL)
    assert target.changes(report) == []


@pytest.mark.parametrize("name", [name for name in PAYLOADS if name != "a library"])
def test_control_unpickling_executes_code(name: str, target: Any, unsandboxed: Any) -> None:
    report = unsandboxed.run(PickledProcessor(PAYLOADS[name][0](target)))
    assert any(re.fullmatch("changed: new.*", each) for each in target.changes_until("changed: new.*", report))


def captured(target: Any) -> SourceProcessor:
    return SourceProcessor("", "P", pickle.dumps(Call(exec, python(target))))


def test_unpickling_captured_values_has_no_effect(target: Any, sandboxed: Any) -> None:
    report = sandboxed.run(captured(target))
    assert "PermissionError" in report.load_error
    assert target.changes(report) == []


def test_control_unpickling_captured_values_executes_code(target: Any, unsandboxed: Any) -> None:
    assert "changed: new" in target.changes_until("changed: new", unsandboxed.run(captured(target)))


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(by_name("os", "_exit", 0), id="exits"),
        pytest.param(by_name("os", "abort"), id="aborts"),
        pytest.param(by_name("ctypes", "string_at", 0), id="crashes"),
        pytest.param(by_name("time", "sleep", 1000), id="sleeps"),
        pytest.param(by_name("builtins", "exec", "while True: pass"), id="loops"),
        pytest.param(by_name("signal", "pause"), id="waits for a signal"),
        pytest.param(by_name("builtins", "bytearray", 1 << 40), id="allocates"),
        pytest.param(b"\x80\x04" + b"\x95" + b"\xff" * 7 + b"\x7f" + b"N.", id="wrong frame length"),
        pytest.param(b"(" * 100_000 + b"." * 10, id="only marks"),
        pytest.param(b"\x80\x04N" + b"\x85" * 100_000 + b".", id="deep nesting"),
        pytest.param(b"\x80\x04\x8b\xff\xff\xff\x7fabc.", id="integer of gigabytes"),
        pytest.param(b"\x80\x04j\xff\xff\xff\xff.", id="missing memo entry"),
        pytest.param(b"\x80\x04Nr\xff\xff\xff\x7f.", id="huge memo index"),
    ],
)
def test_pickle_that_crashes_its_process_is_contained(payload: bytes, target: Any, short_deadlines: Any) -> None:
    report = short_deadlines.run(PickledProcessor(payload))
    assert report.load_error != ""
    assert target.changes(report) == []
