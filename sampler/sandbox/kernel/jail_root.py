"""A private root directory for the zygote and its sandboxes that holds only libraries, read-only."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from . import namespaces
from .syscalls import syscall

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 32, 4096, 16384, 1 << 18
_MS_NOATIME, _MS_NODIRATIME, _MS_RELATIME, _ST_RELATIME = 1024, 2048, 1 << 21, 4096
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4

_MOUNT_POINTS = ("/tmp", "/mnt", "/media", "/srv", "/run", "/var/tmp", "/opt")
"""Candidate mount points for the new root, in a private mount namespace."""
_TMPFS_OPTIONS = b"mode=0755,size=1m,nr_inodes=4096"


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("user_namespace", ctypes.c_uint64),
    )


def enter(readable: Sequence[Path]) -> bool:
    """Move this process into a new mount namespace, and change its root to a file system with only these directories.

    The new root is an empty tmpfs. Each directory is bind-mounted read-only at its path as given and at its real path,
    so that symbolic links keep working. Their parent directories have mode 0755, so that another user can reach a
    library below a private directory. `/dev` holds only `null`; there is no `/proc`.

    Args:
        readable: the directories. Those that do not exist are skipped.

    Returns:
        Whether the root was changed. If not, the old root is intact. The working directory is `/` in both cases.

    Raises:
        OSError: the old root could not be unmounted after the change. The process must exit.
    """
    os.chdir("/")
    bindings = _bindings(readable)
    mount_point = _mount_point(bindings)
    # Always unshare here, so that the machine's own mounts can never be changed by mistake.
    if mount_point is None or not namespaces.unshare("mount"):
        return False
    try:
        _mount(None, Path("/"), None, _MS_REC | _MS_PRIVATE)
        _mount("tmpfs", mount_point, "tmpfs", _MS_NOSUID | _MS_NODEV, _TMPFS_OPTIONS)
    except OSError:
        return False
    try:
        _fill(mount_point, bindings)
        os.chdir(mount_point)
        syscall("pivot_root", b".", b".")
    except OSError:
        os.chdir("/")
        syscall("umount2", os.fsencode(mount_point), _MNT_DETACH)
        return False
    # The old root is now stacked on top of the new one, see `pivot_root(".", ".")` in pivot_root(2).
    syscall("umount2", b".", _MNT_DETACH)
    os.chdir("/")
    return True


def _bindings(readable: Iterable[Path]) -> dict[Path, Path]:
    """Map paths in the new root to real directories, without those below another."""
    existing = [path for path in readable if os.path.isdir(path)]
    targets = {name: path.resolve() for path in existing for name in (path, path.resolve())}
    outermost = [name for name in sorted(targets) if not any(parent in targets for parent in name.parents)]
    return {name: targets[name] for name in outermost}


def _mount_point(bindings: dict[Path, Path]) -> Path | None:
    needed = [*bindings, *bindings.values()]
    hidden = {each for path in needed for each in (path, *path.parents)}
    free = (Path(each) for each in _MOUNT_POINTS)
    return next((path for path in free if path.is_dir() and path.resolve() not in hidden), None)


def _fill(root: Path, bindings: dict[Path, Path]) -> None:
    for name, target in bindings.items():
        inside = root / name.relative_to("/")
        _make_directories(root, inside)
        _mount(str(target), inside, None, _MS_BIND | _MS_REC)
        _make_read_only(inside)
    _make_directories(root, root / "dev")
    null = root / "dev/null"
    null.touch()
    _mount("/dev/null", null, None, _MS_BIND)
    _mount(None, root, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def _make_directories(root: Path, path: Path) -> None:
    for each in reversed((path, *path.parents)):
        if root in each.parents and not each.exists():
            each.mkdir()
            each.chmod(0o755)  # regardless of the umask


def _make_read_only(path: Path) -> None:
    """Make a bind mount read-only, on Linux 5.12 and later including the mounts below it."""
    attributes = _MountAttributes(set=_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV)
    size = ctypes.sizeof(attributes)
    try:
        syscall("mount_setattr", _AT_FDCWD, os.fsencode(path), _AT_RECURSIVE, attributes, size)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        # A remount replaces all flags, and in a user namespace it must not clear any.
        now = os.statvfs(path).f_flag
        kept = now & (_MS_NOEXEC | _MS_NOATIME | _MS_NODIRATIME) | (_MS_RELATIME if now & _ST_RELATIME else 0)
        _mount(None, path, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV | kept)


def _mount(source: str | None, target: Path, kind: str | None, flags: int, options: bytes | None = None) -> None:
    words = [None if each is None else os.fsencode(each) for each in (source, target, kind)]
    syscall("mount", *words, flags, options)
