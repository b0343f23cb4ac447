"""Runs pytest as an unprivileged user, also if started as root.

Root's Python is often installed below a directory that others cannot access, such as /root. So this program creates a
mount namespace in which such a directory is replaced by a tmpfs that only contains the paths that Python needs.

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
        make_accessible([Path(path) for path in {sys.prefix, sys.base_prefix, *sys.path} if os.path.isdir(path)])
        privileges.become(NOBODY, NOBODY)
    print(f"user {os.getresuid()}, capabilities {privileges.capabilities()}", flush=True)
    os.environ |= {"HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:]])


def make_accessible(needed: list[Path]) -> None:
    if not namespaces.unshare("mount"):
        raise SystemExit("cannot create a mount namespace: run the tests as an ordinary user, or with CAP_SYS_ADMIN")
    syscall("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    needed = [path for each in needed for path in (each, each.resolve())]
    # If a directory itself is private, such as a new virtual environment of root's, use its entries instead.
    paths = {path for each in needed for path in ([each] if is_accessible(each) else each.iterdir())} | {Path.cwd()}
    while private := sorted({parent for path in paths for parent in path.parents if not is_accessible(parent)}):
        below = {path: os.open(path, os.O_PATH) for path in paths if private[0] in path.parents}
        syscall("mount", b"tmpfs", bytes(private[0]), b"tmpfs", 0, b"mode=0755")
        for path, original in sorted(below.items()):
            path.parent.mkdir(parents=True, exist_ok=True)
            if stat.S_ISDIR(os.fstat(original).st_mode):
                path.mkdir(exist_ok=True)
            else:
                path.touch()
            syscall("mount", f"/proc/self/fd/{original}".encode(), bytes(path), None, MS_BIND | MS_REC, None)
            os.close(original)


def is_accessible(folder: Path) -> bool:
    return bool(folder.stat().st_mode & stat.S_IXOTH)


if __name__ == "__main__":
    main()
