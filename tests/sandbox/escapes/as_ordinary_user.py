"""Runs pytest as a user without rights, whoever runs this.

Root's own Python often lies below a folder that others may not enter, such as /root. So a mount namespace is made, in
which an empty folder stands in such a folder's place, with nothing in it but the way to what Python needs.

Usage: `as_ordinary_user.py [arguments of pytest]`
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from logitship.sampler.sandbox.kernel import namespaces, privileges
from logitship.sampler.sandbox.kernel.syscalls import syscall

NOBODY = 65534
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18


def main() -> None:
    if os.geteuid() == 0:
        open_the_way([Path(path) for path in {sys.prefix, sys.base_prefix, *sys.path} if os.path.isdir(path)])
        privileges.become(NOBODY, NOBODY)
    print(f"user {os.getresuid()}, capabilities {privileges.capabilities()}", flush=True)
    os.environ |= {"HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:]])


def open_the_way(needed: list[Path]) -> None:
    if not namespaces.unshare("mount"):
        raise SystemExit("no mount namespace can be made: run the tests as an ordinary user, or with CAP_SYS_ADMIN")
    syscall("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    needed = [path for each in needed for path in (each, each.resolve())]
    # Of a folder that is closed itself, such as a new virtual environment of root's, what is in it.
    ways = {way for each in needed for way in ([each] if may_enter(each) else each.iterdir())} | {Path.cwd()}
    while closed := sorted({above for path in ways for above in path.parents if not may_enter(above)}):
        below = {path: os.open(path, os.O_PATH) for path in ways if closed[0] in path.parents}
        syscall("mount", b"tmpfs", bytes(closed[0]), b"tmpfs", 0, b"mode=0755")
        for path, original in sorted(below.items()):
            path.parent.mkdir(parents=True, exist_ok=True)
            if stat.S_ISDIR(os.fstat(original).st_mode):
                path.mkdir(exist_ok=True)
            else:
                path.touch()
            syscall("mount", f"/proc/self/fd/{original}".encode(), bytes(path), None, MS_BIND | MS_REC, None)
            os.close(original)


def may_enter(folder: Path) -> bool:
    return bool(folder.stat().st_mode & stat.S_IXOTH)


if __name__ == "__main__":
    main()
