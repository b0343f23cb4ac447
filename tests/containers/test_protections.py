"""Protections of sandboxes in a container, by its settings; no processor gets out, whatever is missing."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from logitship.sampler.sandbox.kernel import landlock
from tests.containers import profiles
from tests.containers.conftest import FIRST_MAPPED_ID, ROOT, Podman
from tests.containers.server_in_container import EXPECTED

NO_PRIVILEGES = ("--cap-drop", "ALL", "--security-opt", "no-new-privileges")
ORDINARY_USER = ("--user", "1000:1000", *NO_PRIVILEGES)
READ_ONLY = ("--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp:size=16m,notmpcopyup")
MAPPED_USERS = tuple(f"--{kind}map=0:{FIRST_MAPPED_ID}:65536" for kind in ("uid", "gid"))

WITHOUT_USER = "pid, mount, net, ipc, uts, cgroup"
WITH_USER = f"user, {WITHOUT_USER}"


@dataclass(frozen=True)
class Case:
    """A container.

    Attributes:
        where: its row in the table of `docs/security.md`.
        options: options of `podman run`.
        profile: name of a function of `profiles`; None: podman's profile.
        namespaces: the namespaces that the zygote enters.
        jail_root: there is a root directory for sandboxes.
        uid_drop: each sandbox has a user of its own.
        has_landlock: Landlock is allowed.
    """

    where: str
    options: tuple[str, ...]
    profile: str | None = None
    namespaces: str = ""
    jail_root: bool = False
    uid_drop: bool = False
    has_landlock: bool = True

    @property
    def protections(self) -> str:
        """The line in the server's log, after "protected by: "."""
        parts = {
            "seccomp filter": True,
            f"Landlock (ABI {landlock.abi()})" if self.has_landlock else "Landlock": self.has_landlock,
            f"namespaces ({self.namespaces})" if self.namespaces else "namespaces": bool(self.namespaces),
            "root directory of its own": self.jail_root,
            "change of user": self.uid_drop,
        }
        absent = ", ".join(name for name, is_there in parts.items() if not is_there)
        present = ", ".join(name for name, is_there in parts.items() if is_there)
        return present + (f"; without {absent}" if absent else "")

    @property
    def cells(self) -> list[str]:
        """The row in the table of `docs/security.md`, after the first column."""
        in_a_user_namespace = self.namespaces.startswith("user")
        namespaces = "yes, inside a user namespace" if in_a_user_namespace else "yes" if self.namespaces else "no"
        others = (self.has_landlock, self.jail_root, self.uid_drop)
        landlock_cell, jail_root, uid_drop = ("yes" if each else "no" for each in others)
        return [landlock_cell, namespaces, jail_root, uid_drop]


CASES = (
    Case("root, in a container with `--privileged`", ("--privileged",), None, WITHOUT_USER, True, True),
    Case("root, in a container of podman", (), None, WITH_USER, True),
    Case("root, in a container of podman with `--cap-drop ALL`", NO_PRIVILEGES, None, WITH_USER),
    Case("an ordinary user, in a container of podman", ORDINARY_USER, None, WITH_USER, True),
    Case("root, in a container of Docker", (), "docker_profile", uid_drop=True),
    Case("root, in a container of Docker with `--cap-drop ALL`", NO_PRIVILEGES, "docker_profile"),
    Case("an ordinary user, in a container of Docker", (*ORDINARY_USER, *READ_ONLY), "docker_profile"),
    Case(
        "root, in a container of Docker with `--cap-add SYS_ADMIN`",
        ("--cap-add", "SYS_ADMIN"),
        "docker_profile",
        WITHOUT_USER,
        jail_root=True,
        uid_drop=True,
    ),
    Case(
        "root of a user namespace, with `SYS_ADMIN`: `hostUsers: false` in Kubernetes",
        ("--cap-add", "SYS_ADMIN", *MAPPED_USERS),
        "docker_profile",
        WITHOUT_USER,
        jail_root=True,
    ),
    Case(
        "an ordinary user, with gVisor's answers",
        (*ORDINARY_USER, *READ_ONLY),
        "gvisor_answers",
        WITH_USER.removesuffix(", cgroup"),
        jail_root=True,
        has_landlock=False,
    ),
)


@pytest.fixture
def options(case: Case, tmp_path: Path) -> tuple[str, ...]:
    return case.options if case.profile is None else (*case.options, *with_profile(case.profile, tmp_path))


def with_profile(name: str, folder: Path) -> tuple[str, str]:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(getattr(profiles, name)()))
    return ("--security-opt", f"seccomp={file}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.where)
def test_protections_are_those_of_the_table(podman: Podman, case: Case, options: tuple[str, ...]) -> None:
    report = podman.serve(options=options)
    assert report["protections"] == case.protections, report["log"]
    assert report["user"] == (1000 if "1000:1000" in options else 0)
    assert report["faults"] == EXPECTED
    assert report["alive"], report["log"]
    assert report["status"] == 0


def test_table_of_the_documentation() -> None:
    """The table is what the tests above see: each row, and no other row about containers."""
    page = (ROOT / "docs/security.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    told = {
        first: others for first, *others in rows if re.search("in a container|user namespace, with|gVisor's", first)
    }
    assert told == {case.where: case.cells for case in CASES}


@pytest.mark.parametrize("user", [(), ORDINARY_USER], ids=["root", "an ordinary user"])
def test_filter_alone_is_refused(podman: Podman, tmp_path: Path, user: tuple[str, ...]) -> None:
    report = podman.serve(options=(*user, *with_profile("old_docker_profile", tmp_path)))
    assert report["status"] == 1
    assert "logitship: this kernel cannot sandbox shipped code" in report["log"]
    for remedy in ("enable Landlock (Linux 5.13 or later", "a container profile that allows unshare and mount"):
        assert remedy in report["log"]
    assert report["faults"] == {}


VISIBLE = {"target_of_a_link", "times", "times_by_statx"}
"""Attempts that succeed without a root directory of its own, see "What is visible" in `docs/security.md`."""
ESCAPES = ("files", "network", "pickles", "processes", "secrets", "tenants")
ESCAPE_CASES: dict[str, Any] = {
    case.where: case for case in CASES if case.where.startswith("an ordinary user") or "--privileged" in case.options
}
"""Tests that run as root look at a sandbox from outside, for which root needs CAP_SYS_PTRACE."""


@pytest.mark.parametrize("case", ESCAPE_CASES.values(), ids=ESCAPE_CASES.keys())
def test_escapes(podman: Podman, case: Case, options: tuple[str, ...]) -> None:
    """The escape tests, without their controls, which need the rights that the container takes away."""
    folder = ROOT / "tests/sandbox/escapes"
    files = [str(folder / f"test_{name}.py") for name in ESCAPES]
    arguments = ["-q", "-p", "no:cacheprovider", f"--confcutdir={folder}", "-k", "not test_control"]
    pytest_path = [f"--rootdir={ROOT}", "-o", f"pythonpath={ROOT}"]
    run = podman.run(sys.executable, "-m", "pytest", *arguments, *pytest_path, *files, options=options)
    output = run.stdout + run.stderr
    failed = set(re.findall(r"^FAILED .*\[(\w+)--\]$", output, re.MULTILINE))
    assert len(re.findall(r"^(?:FAILED|ERROR) ", output, re.MULTILINE)) == len(failed), output[-5000:]
    assert failed == (set() if case.jail_root else VISIBLE), output[-5000:]
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None, output[-5000:]
    assert int(passed[1]) > 150
