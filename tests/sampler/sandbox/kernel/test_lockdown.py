from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from logitship.sampler.sandbox.kernel import landlock
from logitship.sampler.sandbox.kernel.lockdown import Lockdown
from tests.sampler.sandbox.kernel.conftest import Run

ROOT = os.geteuid() == 0
CONTAINER_PROFILE = {"unshare": errno.EPERM, "mount": errno.EPERM}
"""System calls refused by a container's seccomp profile."""

ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "all": {"namespaces": True, "jail_root": True},
    "namespaces alone": {"namespaces": True},
    "no namespace": {},
    "container": {"namespaces": True, "jail_root": True, "deny": CONTAINER_PROFILE},
}
LANDLOCKS = [0, *range(1, min(landlock.abi(), 3) + 1), None]
"""No Landlock, old ABI versions, and this kernel's."""
NULL_DEVICE = os.makedev(1, 3)


@pytest.mark.parametrize("abi", LANDLOCKS)
@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_self_test_passes(run_plan: Run, nobody: bool, environment: str, abi: int | None) -> None:
    outcome = run_plan("forbidden_things", nobody=nobody, landlock_abi=abi, **ENVIRONMENTS[environment])
    assert outcome.error == ""
    assert outcome.status == 0
    assert outcome.result["succeeded"] == []
    assert outcome.jailed == (environment == "all")


def test_self_test_passes_in_gvisor(run_plan: Run, nobody: bool) -> None:
    outcome = run_plan("forbidden_things", nobody=nobody, namespaces=True, jail_root=True, like_gvisor=True)
    assert outcome.error == ""
    assert outcome.result["succeeded"] == []
    assert outcome.jailed


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_self_test_passes_as_another_user(run_plan: Run, environment: str) -> None:
    uid = 60001 if ROOT else None
    outcome = run_plan("forbidden_things", uid=uid, **ENVIRONMENTS[environment])
    assert outcome.error == ""
    assert outcome.result["succeeded"] == []


@pytest.mark.parametrize(
    ("environment", "abi"), [("all", None), ("all", 0), ("namespaces alone", None), ("namespaces alone", 0)]
)
def test_tensors_work(run_plan: Run, environment: str, abi: int | None) -> None:
    imports = ["torch", "torch.linalg", "numpy", "numpy.fft", "numpy.random", "dill"]
    outcome = run_plan(
        "arithmetic", imports=imports, landlock_abi=abi, memory_limit=4 << 30, **ENVIRONMENTS[environment]
    )
    assert outcome.error == ""
    assert outcome.result == [0, pytest.approx(8)]


@pytest.mark.parametrize("abi", [None, 0])
def test_libraries_can_be_imported_after_lockdown(run_plan: Run, abi: int | None) -> None:
    names = ["wave", "sqlite3", "sympy"]
    uid = 60001 if ROOT else None
    outcome = run_plan("import_modules", names, landlock_abi=abi, uid=uid, **ENVIRONMENTS["all"])
    assert outcome.error == ""
    assert outcome.result == names


def test_no_file_is_opened_without_landlock_and_jail_root(run_plan: Run) -> None:
    outcome = run_plan("look_at_paths", ["/usr/lib", "/etc/passwd", "/proc/self/maps"], landlock_abi=0)
    assert set(outcome.result.values()) == {errno.EPERM}
    assert "ModuleNotFoundError" in run_plan("import_modules", ["sqlite3"], landlock_abi=0).error


def test_other_descriptors_are_closed(run_plan: Run) -> None:
    outcome = run_plan("descriptors", keep=[9, 11], open_first=12)
    devices = outcome.result
    assert {name for name, device in devices.items() if device == NULL_DEVICE} == {"0", "1", "2"}
    assert {"9", "11"} < set(devices)
    assert len(devices) == 6  # including the socket


def test_descriptors_are_closed_without_close_range(run_plan: Run) -> None:
    outcome = run_plan("descriptors", keep=[9], open_first=12, deny={"close_range": errno.ENOSYS})
    assert outcome.error == ""
    assert len(outcome.result) == 5


def test_output_is_discarded(run_plan: Run) -> None:
    outcome = run_plan("print_much")
    assert (outcome.error, outcome.status) == ("", 0)


def test_standard_descriptors_cannot_be_kept(run_plan: Run) -> None:
    assert "keep_fds: 0, 1 and 2" in run_plan("nothing", keep=[1]).error


def test_process_has_no_privileges(run_plan: Run) -> None:
    seen = run_plan("nothing", uid=60001 if ROOT else None).seen
    uid, gid = (60001, 60001) if ROOT else (os.getuid(), os.getgid())
    assert seen["Uid"].split() == [str(uid)] * 4
    assert seen["Gid"].split() == [str(gid)] * 4
    assert {int(seen[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert (seen["NoNewPrivs"], seen["Seccomp"], seen["Threads"]) == ("1", "2", "1")
    assert seen["NSpgid"] == seen["Pid"]


def test_change_of_user(run_plan: Run) -> None:
    if ROOT:
        assert run_plan("nothing", drop_to=[60001, 60002]).seen["Gid"].split() == ["60002"] * 4
        assert run_plan("nothing", drop_to=[60001, 60002], uid=60003).seen["Uid"].split() == ["60003"] * 4
    else:
        assert "step user" in run_plan("nothing", drop_to=[60001, 60002]).error


@pytest.mark.parametrize("how", ["segfault", "abort", "foreign ABI"])
def test_crash_ends_the_process(run_plan: Run, how: str) -> None:
    outcome = run_plan("end_by", how)
    assert outcome.status < 0
    assert outcome.result is None


PR_SET_SECCOMP = 22
BROKEN: dict[str, dict[str, Any]] = {
    "resource limits": {"deny": {"prlimit64": errno.EPERM}},
    "capabilities": {"deny": {"capset": errno.EPERM}},
    "privileges": {"deny": {"prctl": errno.EPERM}},
    "landlock": {"deny": {"landlock_restrict_self": errno.EPERM}},
    "seccomp": {"deny_if": {"prctl": (0, PR_SET_SECCOMP)}},
}


@pytest.mark.parametrize("step", BROKEN)
def test_failed_step_is_named(run_plan: Run, step: str) -> None:
    outcome = run_plan("nothing", **BROKEN[step])
    assert outcome.error.startswith(f"PermissionError: [Errno 1] cannot lock the sandbox down, step {step}: ")
    assert outcome.seen == {}


def test_failed_change_of_user(run_plan: Run) -> None:
    outcome = run_plan("nothing", nobody=ROOT, uid=60001)
    assert "cannot lock the sandbox down, step user: " in outcome.error


@pytest.mark.parametrize(("abi", "jail_root", "opens"), [(0, False, False), (1, False, True), (0, True, True)])
def test_files_are_opened_with_landlock_or_jail_root(abi: int, jail_root: bool, opens: bool) -> None:
    before = open_descriptors()
    lockdown = Lockdown([], memory_limit=1 << 30, landlock_abi=abi, jail_root=jail_root)
    assert lockdown.opens_files == opens
    opened = open_descriptors() - before
    assert len(opened) == (2 if abi else 1)
    for descriptor in opened:
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)


def open_descriptors() -> set[int]:
    # Without the descriptor of the listing itself.
    return {int(name) for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}
