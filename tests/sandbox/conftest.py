"""Fixtures that find sandbox processes from outside."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

DEADLINE = 60.0
"""Seconds for processes to exit."""


@dataclass(frozen=True)
class SandboxProcesses:
    """The launchers, zygotes and sandboxes started by one test module.

    Attributes:
        mark: a string that appears only in the command lines of these processes.
    """

    mark: str

    def roles(self) -> dict[int, str]:
        """Return roles by PID: `launcher`, `between` (the launcher and the zygote), `zygote` or `sandbox`.

        Zombies are not included.
        """
        found: dict[int, tuple[int, list[str]]] = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):  # it exits at this moment
                    if self.mark.encode() in (folder / "cmdline").read_bytes() and int(folder.name) != os.getpid():
                        status = dict(
                            line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line
                        )
                        found[int(folder.name)] = int(status["PPid"]), status["NSpid"].split()
        return {process: _role(parent in found, inner) for process, (parent, inner) in found.items()}

    def of(self, role: str) -> set[int]:
        """Return the PIDs of a role."""
        return {process for process, its_role in self.roles().items() if its_role == role}

    def wait_for_end(self) -> None:
        """Wait until all have exited. Fails if another was started meanwhile."""
        for process in self.roles():
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(process)
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                ended = poll.poll(DEADLINE * 1e3)
                os.close(pidfd)
                assert ended, f"process {process} does not exit"
        assert not self.roles()


def _role(is_child: bool, ids: list[str]) -> str:
    if len(ids) > 1:  # in a new PID namespace, in which the zygote has PID 1
        return "zygote" if ids[-1] == "1" else "sandbox"
    return "between" if is_child else "launcher"


@pytest.fixture(scope="module")
def sandbox_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxProcesses]:
    """Processes of the engines that the module's tests start, and not those of other test workers."""
    mark = str(tmp_path_factory.mktemp("mark"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, mark])  # a launcher's command line contains `sys.path`
        yield SandboxProcesses(mark)
