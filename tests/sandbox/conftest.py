"""Finds the processes of sandboxes from outside."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

DEADLINE = 30.0
"""Seconds that processes get to end."""


@dataclass(frozen=True)
class SandboxProcesses:
    """The launchers, zygotes and sandboxes that stem from one module of tests.

    Attributes:
        mark: a word that stands in the command lines of these, and in no other's.
    """

    mark: str

    def roles(self) -> dict[int, str]:
        """By process id: `launcher`, `between` (the launcher and the zygote), `zygote` or `sandbox`.

        What has ended is not among them, even if nobody has waited for it yet.
        """
        found: dict[int, tuple[int, list[str]]] = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):  # it ends at this moment
                    if self.mark.encode() in (folder / "cmdline").read_bytes() and int(folder.name) != os.getpid():
                        status = dict(
                            line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line
                        )
                        found[int(folder.name)] = int(status["PPid"]), status["NSpid"].split()
        return {process: _role(parent in found, inner) for process, (parent, inner) in found.items()}

    def of(self, role: str) -> set[int]:
        """Those of a role."""
        return {process for process, its_role in self.roles().items() if its_role == role}

    def wait_for_end(self) -> None:
        """Until all have ended, and no other was started meanwhile."""
        for process in self.roles():
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(process)
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                ended = poll.poll(DEADLINE * 1e3)
                os.close(pidfd)
                assert ended, f"process {process} does not end"
        assert not self.roles()


def _role(is_child: bool, ids: list[str]) -> str:
    if len(ids) > 1:  # in a process namespace of its own, of which the zygote is the first
        return "zygote" if ids[-1] == "1" else "sandbox"
    return "between" if is_child else "launcher"


@pytest.fixture(scope="module")
def sandbox_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxProcesses]:
    """Those of the engines that the module's tests start. Tests that run beside these have others."""
    mark = str(tmp_path_factory.mktemp("mark"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, mark])  # a launcher's command line says where it imports from
        yield SandboxProcesses(mark)
