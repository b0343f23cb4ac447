from __future__ import annotations

import errno
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from logitship.sampler.sandbox.kernel import landlock
from logitship.sampler.sandbox.kernel.lockdown import Lockdown

Run = Callable[..., SimpleNamespace]
ROOT = os.geteuid() == 0
NOT_ROOTS = {"unshare": errno.EPERM, "mount": errno.EPERM}
"""What the profile of a container refuses."""

PLACES: dict[str, dict[str, Any]] = {
    "all": {"namespaces": True, "jail_root": True},
    "namespaces alone": {"namespaces": True},
    "no namespace": {},
    "container": {"namespaces": True, "jail_root": True, "deny": NOT_ROOTS},
}
LANDLOCKS = [0, *range(1, min(landlock.abi(), 3) + 1), None]
"""None, old versions, and this kernel's."""
NULL_DEVICE = os.makedev(1, 3)


@pytest.mark.parametrize("abi", LANDLOCKS)
@pytest.mark.parametrize("place", PLACES)
def test_nothing_forbidden_succeeds(run_plan: Run, nobody: bool, place: str, abi: int | None) -> None:
    outcome = run_plan("forbidden_things", nobody=nobody, landlock_abi=abi, **PLACES[place])
    assert outcome.error == ""
    assert outcome.status == 0
    assert outcome.result["succeeded"] == []
    assert outcome.jailed == (place == "all")


@pytest.mark.parametrize("place", PLACES)
def test_nothing_forbidden_succeeds_as_a_user_of_its_own(run_plan: Run, place: str) -> None:
    uid = 60001 if ROOT else None
    outcome = run_plan("forbidden_things", uid=uid, **PLACES[place])
    assert outcome.error == ""
    assert outcome.result["succeeded"] == []


@pytest.mark.parametrize(
    ("place", "abi"), [("all", None), ("all", 0), ("namespaces alone", None), ("namespaces alone", 0)]
)
def test_tensors_work(run_plan: Run, place: str, abi: int | None) -> None:
    imports = ["torch", "torch.linalg", "numpy", "numpy.fft", "numpy.random", "dill"]
    outcome = run_plan("arithmetic", imports=imports, landlock_abi=abi, memory_limit=4 << 30, **PLACES[place])
    assert outcome.error == ""
    assert outcome.result == [0, pytest.approx(8)]


@pytest.mark.parametrize("abi", [None, 0])
def test_libraries_can_be_imported_later(run_plan: Run, abi: int | None) -> None:
    names = ["wave", "sqlite3", "sympy"]
    uid = 60001 if ROOT else None
    outcome = run_plan("import_modules", names, landlock_abi=abi, uid=uid, **PLACES["all"])
    assert outcome.error == ""
    assert outcome.result == names


def test_without_a_border_around_files_none_is_opened(run_plan: Run) -> None:
    outcome = run_plan("look_at_paths", ["/usr/lib", "/etc/passwd", "/proc/self/maps"], landlock_abi=0)
    assert set(outcome.result.values()) == {errno.EPERM}
    assert "ModuleNotFoundError" in run_plan("import_modules", ["sqlite3"], landlock_abi=0).error


def test_only_its_descriptors_are_left_and_the_standard_ones_lead_nowhere(run_plan: Run) -> None:
    outcome = run_plan("descriptors", keep=[9, 11], open_first=12)
    devices = outcome.result
    assert {name for name, device in devices.items() if device == NULL_DEVICE} == {"0", "1", "2"}
    assert {"9", "11"} < set(devices)
    assert len(devices) == 6  # the sixth is its socket


def test_descriptors_are_closed_on_a_kernel_without_close_range(run_plan: Run) -> None:
    outcome = run_plan("descriptors", keep=[9], open_first=12, deny={"close_range": errno.ENOSYS})
    assert outcome.error == ""
    assert len(outcome.result) == 5


def test_what_it_prints_goes_nowhere(run_plan: Run) -> None:
    outcome = run_plan("print_much")
    assert (outcome.error, outcome.status) == ("", 0)


def test_a_standard_descriptor_cannot_be_kept(run_plan: Run) -> None:
    assert "keep_fds: 0, 1 and 2" in run_plan("nothing", keep=[1]).error


def test_seen_from_outside_it_has_no_rights(run_plan: Run) -> None:
    seen = run_plan("nothing", uid=60001 if ROOT else None).seen
    uid, gid = (60001, 60001) if ROOT else (os.getuid(), os.getgid())
    assert seen["Uid"].split() == [str(uid)] * 4
    assert seen["Gid"].split() == [str(gid)] * 4
    assert {int(seen[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert (seen["NoNewPrivs"], seen["Seccomp"], seen["Threads"]) == ("1", "2", "1")
    assert seen["NSsid"] == seen["NSpgid"] == seen["Pid"]


def test_it_becomes_the_user_of_all_or_its_own(run_plan: Run) -> None:
    if ROOT:
        assert run_plan("nothing", drop_to=[60001, 60002]).seen["Gid"].split() == ["60002"] * 4
        assert run_plan("nothing", drop_to=[60001, 60002], uid=60003).seen["Uid"].split() == ["60003"] * 4
    else:
        assert "step user" in run_plan("nothing", drop_to=[60001, 60002]).error


@pytest.mark.parametrize("how", ["segfault", "abort", "foreign ABI"])
def test_a_crash_is_the_end_of_it(run_plan: Run, how: str) -> None:
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
def test_a_step_that_fails_is_named_and_nothing_runs(run_plan: Run, step: str) -> None:
    outcome = run_plan("nothing", **BROKEN[step])
    assert outcome.error.startswith(f"PermissionError: [Errno 1] cannot lock the sandbox down, step {step}: ")
    assert outcome.seen == {}


def test_a_user_that_cannot_be_had_is_an_error(run_plan: Run) -> None:
    outcome = run_plan("nothing", nobody=ROOT, uid=60001)
    assert "cannot lock the sandbox down, step user: " in outcome.error


@pytest.mark.parametrize(("abi", "jail_root", "opens"), [(0, False, False), (1, False, True), (0, True, True)])
def test_files_are_opened_where_something_says_which(abi: int, jail_root: bool, opens: bool) -> None:
    before = open_descriptors()
    lockdown = Lockdown([], memory_limit=1 << 30, landlock_abi=abi, jail_root=jail_root)
    assert lockdown.opens_files == opens
    opened = open_descriptors() - before
    assert len(opened) == (2 if abi else 1)
    for descriptor in opened:
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)


def open_descriptors() -> set[int]:
    # The one that the listing itself used is gone afterwards.
    return {int(name) for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}
