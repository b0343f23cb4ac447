"""Seccomp profiles of container runtimes, derived from that of podman, which all of them derive from Docker's."""

from __future__ import annotations

import copy
import errno
import json
from pathlib import Path
from typing import Any

PODMAN_PROFILE = Path("/usr/share/containers/seccomp.json")

NEED_SYS_ADMIN = frozenset(
    {
        *("bpf", "clone3", "fanotify_init", "fsconfig", "fsmount", "fsopen", "fspick", "lookup_dcookie", "mount"),
        *("mount_setattr", "move_mount", "open_tree", "perf_event_open", "pivot_root", "quotactl", "setdomainname"),
        *("sethostname", "setns", "syslog", "umount", "umount2", "unshare"),
    }
)
"""Calls that Docker's profile allows with CAP_SYS_ADMIN only, and podman's always: `profiles/seccomp/default.json` of
moby."""
LANDLOCK = frozenset({"landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"})
CLONE_NEW_ANY = 0x7E020000
CLONE_NEWCGROUP = 0x02000000
SECCOMP_SET_MODE_FILTER = 1
ALLOW, ERRNO = "SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO"


def podman_profile() -> dict[str, Any]:
    profile: dict[str, Any] = json.loads(PODMAN_PROFILE.read_text())
    return profile


def docker_profile() -> dict[str, Any]:
    """Return podman's profile with the restrictions that Docker's has in addition."""
    profile = _without(podman_profile(), NEED_SYS_ADMIN | {"clone"})
    profile["defaultErrnoRet"] = errno.EPERM
    any_clone = {"index": 0, "value": CLONE_NEW_ANY, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    privileged = {"includes": {"caps": ["CAP_SYS_ADMIN"]}}
    unprivileged = {"excludes": {"caps": ["CAP_SYS_ADMIN"]}}
    profile["syscalls"] += [
        {"names": sorted(NEED_SYS_ADMIN | {"clone"}), "action": ALLOW, **privileged},
        {"names": ["clone"], "action": ALLOW, "args": [any_clone], **unprivileged},
        {"names": ["clone3"], "action": ERRNO, "errnoRet": errno.ENOSYS, **unprivileged},
    ]
    return profile


def old_docker_profile() -> dict[str, Any]:
    """Return Docker's profile as it was before version 23, which did not know Landlock."""
    return _without(docker_profile(), LANDLOCK)


def gvisor_answers() -> dict[str, Any]:
    """Return podman's profile with gVisor's answers: `pkg/sentry/syscalls/linux/linux64.go`, google/gvisor#13439."""
    lacking = LANDLOCK | {"mount_setattr"}
    profile = _without(podman_profile(), lacking | {"seccomp", "unshare"})
    sets_filter = {"index": 0, "value": SECCOMP_SET_MODE_FILTER}
    invalid = {"action": ERRNO, "errnoRet": errno.EINVAL}

    def cgroup(flag: int) -> dict[str, Any]:
        return {"index": 0, "value": CLONE_NEWCGROUP, "valueTwo": flag, "op": "SCMP_CMP_MASKED_EQ"}

    profile["syscalls"] += [
        {"names": sorted(lacking), "action": ERRNO, "errnoRet": errno.ENOSYS},
        {"names": ["seccomp"], "action": ALLOW, "args": [{**sets_filter, "op": "SCMP_CMP_EQ"}]},
        {"names": ["seccomp"], **invalid, "args": [{**sets_filter, "op": "SCMP_CMP_NE"}]},
        {"names": ["unshare"], "action": ALLOW, "args": [cgroup(0)]},
        {"names": ["unshare"], **invalid, "args": [cgroup(CLONE_NEWCGROUP)]},
    ]
    return profile


def _without(profile: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Return a copy of a profile that no longer mentions some calls."""
    result = copy.deepcopy(profile)
    for group in result["syscalls"]:
        group["names"] = [name for name in group["names"] if name not in names]
    result["syscalls"] = [group for group in result["syscalls"] if group["names"]]
    return result
