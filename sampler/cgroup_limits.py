"""Memory and CPU limits of this process's control groups: those of a container, a pod or a systemd unit.

Both versions of control groups are read (cgroups(7), `Documentation/admin-guide/cgroup-v2.rst`). A limit of a parent
group applies too, as far as this process can see it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC_SELF = Path("/proc/self")
_NO_LIMIT = 1 << 60
"""Version 1 writes the largest number of pages that it can count for "no limit": no machine has that much memory."""

_MEMORY_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.high", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""The files of a limit and of the use, and the prefix of the statistics that include the groups below."""
_CACHED = {"": "file", "total_": "total_cache"}


@dataclass(frozen=True)
class MemoryLimit:
    """The group with the least free memory.

    Attributes:
        limit: bytes that its processes may use together; infinite if there is no limit.
        free: bytes of those that are free, or hold cached files, which the kernel drops when memory is needed.
    """

    limit: float = math.inf
    free: float = math.inf


def memory_limit(proc_self: Path = _PROC_SELF) -> MemoryLimit:
    """Return the memory limit of this process.

    Args:
        proc_self: `/proc/self`.
    """
    found = [MemoryLimit()]
    for folder in _folders("memory", proc_self):
        for limit_name, usage_name, prefix in _MEMORY_FILES:
            # A group without the controller, such as the root of version 2, lacks the files.
            with contextlib.suppress(OSError, ValueError, KeyError):
                limit = _number(folder / limit_name)
                if limit < _NO_LIMIT:
                    statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    # Shared memory and files of a tmpfs are counted as cached, but cannot be dropped.
                    cached = int(statistics[_CACHED[prefix]]) - int(statistics[f"{prefix}shmem"])
                    used = _number(folder / usage_name) - max(0, cached)
                    found.append(MemoryLimit(limit, max(0, limit - used)))
    return min(found, key=lambda each: each.free)


def cpu_quota(proc_self: Path = _PROC_SELF) -> float:
    """Return how many cores' time this process may use, such as 1.5; infinite if there is no limit.

    Args:
        proc_self: `/proc/self`.
    """
    return min((quota for folder in _folders("cpu", proc_self) for quota in _quotas(folder)), default=math.inf)


def num_cores(proc_self: Path = _PROC_SELF) -> int:
    """Return the number of threads that can compute at the same time: by the affinity and the CPU quota, at least 1.

    A part of a core's time is not counted: where a thread of a team must wait for its quota, all others wait for it.

    Args:
        proc_self: `/proc/self`.
    """
    return max(1, int(min(len(os.sched_getaffinity(0)), cpu_quota(proc_self))))


def process_limit(proc_self: Path = _PROC_SELF) -> float:
    """Return how many processes and threads the group may have together; infinite if there is no limit.

    Args:
        proc_self: `/proc/self`.
    """
    found = [math.inf]
    for folder in _folders("pids", proc_self):
        with contextlib.suppress(OSError, ValueError):
            found.append(_number(folder / "pids.max"))
    return min(found)


def _quotas(folder: Path) -> Iterator[float]:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        if quota != "max":
            yield int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        microseconds = _number(folder / "cpu.cfs_quota_us")
        if microseconds > 0:
            yield microseconds / _number(folder / "cpu.cfs_period_us")


def _number(file: Path) -> float:
    text = file.read_text().strip()
    return math.inf if text == "max" else int(text)


def _folders(controller: str, proc_self: Path) -> Iterator[Path]:
    """Yield the folders of this process's group and of its parents, of version 1 and of version 2."""
    try:
        groups = (proc_self / "cgroup").read_text().splitlines()
        mounts = (proc_self / "mountinfo").read_text().splitlines()
    except OSError:
        return
    paths: dict[str, str] = {}
    for line in groups:
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)  # "" for version 2
    for line in mounts:
        fields, _, kind = line.partition(" - ")
        root, mount_point = (_unescaped(field) for field in fields.split()[3:5])
        kind, _, options = kind.split(" ", 2)
        name = "" if kind == "cgroup2" else controller
        if name in paths and (kind == "cgroup2" or (kind == "cgroup" and controller in options.split(","))):
            yield from _upwards(Path(mount_point), root, paths[name])


def _upwards(mount_point: Path, root: str, path: str) -> Iterator[Path]:
    """Yield the folder of a group, and those above it up to the mount point, which shows the group `root`."""
    folder = Path(path)
    # In a container, the mount may show a part of the hierarchy only, or one that this path is not in.
    below = folder.relative_to(root) if folder.is_relative_to(root) and ".." not in folder.parts else Path()
    yield from (mount_point / each for each in (below, *below.parents))


def _unescaped(field: str) -> str:
    """Return a path of mountinfo, in which a space is an octal number after a backslash."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
