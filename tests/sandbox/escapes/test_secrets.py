"""A sandbox inherits nothing from the server: no environment, memory or open files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


def environment(w: SimpleNamespace) -> str:
    import os

    return str(sorted(os.environ.items()))


def environment_through_libc(w: SimpleNamespace) -> list[bytes]:
    import ctypes

    found = []
    variables = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    while variables[len(found)]:
        found.append(variables[len(found)])
    return found


def text_in_memory(w: SimpleNamespace) -> list[str]:
    import gc
    import re

    gc.unfreeze()  # include the objects that the zygote had before the fork
    texts: set[str | bytes] = set()
    for each in gc.get_objects():
        for held in gc.get_referents(each):
            # The collector does not track a dict that only holds text.
            texts.update(text for text in (held, *gc.get_referents(held)) if type(text) in (str, bytes))
    assert len(texts) > 10_000
    return [str(text[:100]) for text in texts if re.search("[S]ECRET-[0-9a-f]", str(text[:2000]))]


def text_in_raw_memory(w: SimpleNamespace) -> list[bytes]:
    """Search the pages around every object."""
    import ctypes
    import gc
    import re

    from attacker import is_mapped

    gc.unfreeze()
    pages: set[int] = set()
    found = []
    for start in sorted({id(each) // 4096 for each in gc.get_objects()}):
        for page in range(start - 2, start + 20):
            if len(pages) < 200_000 and page not in pages and is_mapped(page * 4096):
                found += re.findall(b"[S]ECRET-[0-9a-f]{32}", ctypes.string_at(page * 4096, 4096))
                pages.add(page)
    assert len(pages) > 1000
    return found[:10]


def text_in_frames(w: SimpleNamespace) -> str:
    import sys

    frame, shown = sys._getframe(), ""
    while frame is not None:
        shown += f"{frame.f_code.co_filename} {list(frame.f_locals)} {list(frame.f_globals)}"
        shown += "".join(str(value) for value in frame.f_globals.values() if type(value) is str)
        frame = frame.f_back
    return shown[-2500:]


def modules_of_the_server(w: SimpleNamespace) -> str:
    import importlib
    import os

    shown = str(dict(os.environ))
    for name in ("config", "engine.build", "http.auth"):
        try:
            shown += str(vars(importlib.import_module(f"logitship.server.{name}")).keys())
        except (ImportError, PermissionError) as error:  # some modules write to the home directory on import
            shown += str(error)
    return shown[:2500]


def open_descriptors(w: SimpleNamespace) -> str:
    import os

    found = []
    for descriptor in range(3, 4096):
        try:
            found.append(os.pread(descriptor, 100, 0))
        except OSError as error:
            if error.errno != 9:  # EBADF
                found.append(error.errno)
    return str(found)


SECRET = "the secret leaked"
ATTACKS: list[Any] = [
    (environment, "returned .*", SECRET),
    (environment_through_libc, "returned .*", SECRET),
    (text_in_memory, r"returned \[\]", SECRET),
    (text_in_raw_memory, r"returned \[\]", SECRET),
    (text_in_frames, "returned .*", SECRET),
    (modules_of_the_server, "returned .*", SECRET),
    (open_descriptors, r"returned '\[29\]'", SECRET),  # ESPIPE: only its connection
]


def name_of(value: Any) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("attempt", "refusal", "change"), ATTACKS, ids=name_of)
def test_sandbox_holds_no_secret(attempt: Any, refusal: str, change: str, target: Any, sandboxed: Any) -> None:
    report = sandboxed(attempt)
    assert re.fullmatch(refusal, report.answer, re.DOTALL)
    assert target.changes(report) == []


@pytest.mark.thorough
@pytest.mark.parametrize(("attempt", "refusal", "change"), ATTACKS, ids=name_of)
def test_control_finds_the_secret(attempt: Any, refusal: str, change: str, target: Any, unsandboxed: Any) -> None:
    assert change in target.changes_until(change, unsandboxed(attempt))


def nothing(w: SimpleNamespace) -> None: ...


def test_status_in_proc(jail: Any, sandboxed: Any) -> None:
    pid = sandboxed(nothing).pid
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    found = {name: status[name].split() for name in status}
    assert found["Seccomp"] == ["2"]
    assert found["NoNewPrivs"] == ["1"]
    assert found["Threads"] == ["1"]
    assert {found[name][0] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert len(found["NSpid"]) == 2 or "pid" not in jail.protections.namespaces
    if os.geteuid() == 0:
        assert not {"0", str(os.getuid())} & {*found["Uid"], *found["Gid"]}
        assert found["Groups"] == []


def test_descriptors_in_proc(sandboxed: Any) -> None:
    pid = sandboxed(nothing).pid
    try:
        links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except PermissionError:  # not dumpable, so not even its own user may read it
        assert os.geteuid() != 0
        return
    assert sorted(re.sub(r"\d+", "", link) for link in links) == ["/dev/null"] * 3 + ["socket:[]"]
    assert len([each for each in links if each == "/dev/null"]) == 3
