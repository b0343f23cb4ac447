"""A real `logitship serve` as a child process, and the resources that it and its descendants use."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

START_TIMEOUT = 180.0
"""Seconds until the server answers; it loads a model, and imports torch twice."""
STOP_TIMEOUT = 60.0
SHARED_MEMORY = Path("/dev/shm")
_PATIENCE = 10.0
"""Seconds until exiting programs have removed their shared memory."""


@dataclass(frozen=True)
class ServerResources:
    """Resources of a server at one moment.

    Attributes:
        server_pss: proportional set size of the server's own process in bytes, without pages of files such as
            libraries, which other programs on the machine share.
        tree_pss: the same for the server and all processes below it: launcher, zygote and sandboxes.
        server_rss: resident set size of the server's own process in bytes.
        descriptors: number of open descriptors of the server's own process.
        threads: number of threads of the server's own process.
        processes: number of processes below the server.
        zombies: number of exited processes that were not waited for.
        files: number of files in the server's folder for temporary files.
    """

    server_pss: int
    tree_pss: int
    server_rss: int
    descriptors: int
    threads: int
    processes: int
    zombies: int
    files: int


@dataclass(frozen=True)
class SoakServer:
    """A running server.

    Attributes:
        base_url: URL that it listens on.
        pid: PID of its process.
        temporary: its folder for temporary files.
        log: file with its output.
    """

    base_url: str
    pid: int
    temporary: Path
    log: Path

    @property
    def rss(self) -> int:
        """Bytes of the server's own process that are in memory, those that it shares included."""
        return _field(Path(f"/proc/{self.pid}/status"), "VmRSS:")

    @property
    def num_descriptors(self) -> int:
        """Number of open descriptors of the server's own process."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def num_threads(self) -> int:
        """Number of threads of the server's own process."""
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def resources(self) -> ServerResources:
        """Measure its resources now. It takes some 0.1 s, in which the server cannot map memory."""
        below = list(processes_below(self.pid))
        own = proportional_bytes(self.pid)
        return ServerResources(
            server_pss=own,
            tree_pss=own + sum(map(proportional_bytes, below)),
            server_rss=self.rss,
            descriptors=self.num_descriptors,
            threads=self.num_threads,
            processes=len(below),
            zombies=sum(_state(pid) == "Z" for pid in below),
            files=sum(len(files) for _, _, files in os.walk(self.temporary)),
        )

    def state(self) -> dict[str, Any]:
        """Return the engine's state: `internal_states` of `/server_info`."""
        answer = httpx.get(f"{self.base_url}/server_info", timeout=60)
        state: dict[str, Any] = answer.raise_for_status().json()["internal_states"][0]
        return state

    def errors(self) -> list[str]:
        """Return the internal errors that it logged, each with its traceback."""
        records = re.split(r"^(?=\d{4}-\d\d-\d\d )", self.log.read_text(errors="replace"), flags=re.MULTILINE)
        return [record.rstrip() for record in records if " ERROR " in record.partition("\n")[0]]

    def left_behind(self, below: Sequence[int]) -> list[str]:
        """Return what a terminated server left behind.

        Args:
            below: the processes that were below it.
        """
        files = [Path(folder) / name for folder, _, names in os.walk(self.temporary) for name in names]
        return [*(f"process {pid}" for pid in below if _stat(pid)), *map(str, files)]

    def end_of_log(self, lines: int = 20) -> str:
        """Return the end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@contextmanager
def soak_server(folder: Path, flags: Sequence[str]) -> Iterator[SoakServer]:
    """Start `logitship serve` with these flags, and end it as an operator does.

    Args:
        folder: for its log and its temporary files.
        flags: of the command line.

    Raises:
        RuntimeError: it does not start, or does not end by itself.
    """
    temporary = folder / "temporary"
    temporary.mkdir()
    log = folder / "server.log"
    port = _free_port()
    command = [sys.executable, "-c", "import sys; from logitship.server.cli import main; sys.exit(main())", "serve"]
    with log.open("wb") as written:
        process = subprocess.Popen(
            [*command, "--port", str(port), *flags],
            stdout=written,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(temporary)},
        )
    server = SoakServer(f"http://127.0.0.1:{port}", process.pid, temporary, log)
    try:
        _wait_until_healthy(server, process)
        yield server
        process.terminate()
        if process.wait(STOP_TIMEOUT) != 0:
            raise RuntimeError(f"the server ended with {process.returncode}:\n{server.end_of_log()}")
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the server did not end within {STOP_TIMEOUT:g} s:\n{server.end_of_log()}") from None
    finally:
        process.kill()
        process.wait()


def _wait_until_healthy(server: SoakServer, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_TIMEOUT
    while process.poll() is None and time.monotonic() < until:
        try:
            if httpx.get(f"{server.base_url}/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise RuntimeError(f"the server did not start:\n{server.end_of_log()}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


def processes_below(pid: int) -> Iterator[int]:
    """Return the living descendants of a process."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (fields := _stat(int(name))):
            parents.setdefault(int(fields[1]), []).append(int(name))
    found = list(parents.get(pid, ()))
    for each in found:  # which grows
        found += parents.get(each, ())
    yield from found


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else ""


def _stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` after the name (state, parent, …); none if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def proportional_bytes(pid: int) -> int:
    """Return the anonymous and shared memory of a process, as proportional set size (PSS); 0 if it is gone.

    Only root may read the PSS of a sandbox. For other users, its unshared memory is returned: the zygote owns the rest.
    """
    folder = Path(f"/proc/{pid}")
    try:
        return _field(folder / "smaps_rollup", "Pss_Anon:") + _field(folder / "smaps_rollup", "Pss_Shmem:")
    except PermissionError:
        resident, shared = map(int, (folder / "statm").read_text().split()[1:3])
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _field(file: Path, name: str) -> int:
    """Return the bytes in a line such as `Pss: 12 kB`; 0 without such a line."""
    lines = (line.split() for line in file.read_text().splitlines())
    return next((int(line[1]) * 1024 for line in lines if line and line[0] == name), 0)


def shared_memory_left(before: set[str]) -> list[str]:
    """Return new files in `/dev/shm` that belong to no live process, after those of programs that just end are gone."""
    end = time.monotonic() + _PATIENCE
    while (left := _unused_shared_memory(before)) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def _unused_shared_memory(before: set[str]) -> list[str]:
    new = {entry.name for entry in SHARED_MEMORY.iterdir()} - before
    if not new:
        return []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                new -= set(Path(f"/proc/{name}/maps").read_text().replace(f"{SHARED_MEMORY}/", "\n").split("\n"))
            except OSError:
                continue
    return sorted(new)
