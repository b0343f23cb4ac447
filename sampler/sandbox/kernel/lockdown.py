"""Lockdown of a forked process before it reads any client data, in the order required by the kernel."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import landlock, limits, namespaces, privileges, seccomp
from .readable import readable_paths
from .syscalls import syscall, this_machine

__all__ = ["Lockdown", "readable_paths"]

_LAST_DESCRIPTOR = (1 << 32) - 1


class Lockdown:
    """The lockdown of a sandbox, prepared once in the zygote before forking.

    It holds two file descriptors, close-on-exec, which `apply` uses and closes in the child.
    """

    def __init__(
        self,
        readable: Sequence[Path],
        *,
        memory_limit: int,
        drop_to: tuple[int, int] | None = None,
        landlock_abi: int | None = None,
        jail_root: bool = False,
    ) -> None:
        """Prepare the seccomp filter and the Landlock ruleset.

        Args:
            readable: directories in which files may be opened for reading. With neither Landlock nor a private root
                directory, sandboxes cannot open any file.
            memory_limit: bytes of address space that a sandbox may allocate on top of the zygote's.
            drop_to: default user and group id of sandboxes; None keeps the zygote's.
            landlock_abi: ABI version of Landlock to use, 0 for none; the running kernel's by default.
            jail_root: the zygote is in a private root directory (`jail_root.enter` returned True).

        Raises:
            OSError: this machine or kernel is not supported.
        """
        abi = landlock.abi() if landlock_abi is None else landlock_abi
        self.memory_limit = memory_limit
        self.drop_to = drop_to
        self.opens_files = abi > 0 or jail_root
        self._filter = seccomp.filter_program(this_machine(), opens_files=self.opens_files)
        self._ruleset = landlock.create_ruleset(readable, abi) if abi > 0 else None
        self._null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)

    def apply(self, keep_fds: Sequence[int], uid: int | None = None) -> None:
        """Lock this process down, irrevocably. It must be freshly forked and single-threaded.

        Afterwards, standard input, output and error refer to `/dev/null`, and system calls are filtered.

        Args:
            keep_fds: descriptors to keep open, each at least 3.
            uid: user and group id to change to, instead of `drop_to`.

        Raises:
            OSError: a step failed; the message names it. The process is partly locked down and must exit.
            ValueError: a descriptor of `keep_fds` is below 3.
        """
        if min(keep_fds, default=3) < 3:
            raise ValueError("keep_fds: 0, 1 and 2 are redirected to /dev/null and cannot be kept")
        parent = os.getppid()
        with _step("file descriptors"):
            ruleset = self._close_descriptors(keep_fds)
        with _step("process group"):
            os.setpgid(0, 0)  # no session of its own: see `priority`
        with _step("resource limits"):
            limits.impose(self.memory_limit)
        user = (uid, uid) if uid is not None else self.drop_to
        if user is not None:
            with _step("user"):
                privileges.become(*user)
        namespaces.enter_for_sandbox()
        with _step("capabilities"):
            privileges.drop_capabilities()
        with _step("privileges"):
            # After changing user and capabilities, which reset these.
            privileges.forbid_new_privileges()
            privileges.set_dumpable(False)
            privileges.die_with_parent(signal.SIGKILL)
            if os.getppid() != parent:
                raise ProcessLookupError(errno.ESRCH, "the zygote exited meanwhile")
        if ruleset is not None:
            with _step("landlock"):
                landlock.restrict_self(ruleset)
                os.close(ruleset)
        with _step("seccomp"):
            seccomp.install(self._filter)

    def _close_descriptors(self, keep_fds: Sequence[int]) -> int | None:
        for standard in (0, 1, 2):
            os.dup2(self._null, standard)
        ruleset = [] if self._ruleset is None else [self._ruleset]
        first = 3
        for kept in sorted({*keep_fds, *ruleset}):
            _close_range(first, kept - 1)
            first = kept + 1
        _close_range(first, _LAST_DESCRIPTOR)
        return self._ruleset


def _close_range(first: int, last: int) -> None:
    if first > last:
        return
    try:
        syscall("close_range", first, last, 0)
    except OSError:  # Linux before 5.9
        os.closerange(first, min(last, os.sysconf("SC_OPEN_MAX")) + 1)


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # resource.setrlimit raises ValueError for EPERM
        number = error.errno if isinstance(error, OSError) else errno.EPERM
        raise OSError(number, f"cannot lock the sandbox down, step {name}: {error}") from error
