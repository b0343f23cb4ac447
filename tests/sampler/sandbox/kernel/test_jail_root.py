from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.sampler.sandbox.kernel.conftest import Run


@pytest.fixture
def library(open_folder: Path) -> Path:
    """A directory with a file, a subdirectory and symbolic links; next to it is a file that must be hidden."""
    folder = open_folder / "library"
    (folder / "package").mkdir(parents=True)
    (folder / "package/file").write_text("text")
    (folder / "inside").symlink_to(folder / "package/file")
    (folder / "outside").symlink_to(open_folder / "secret")
    (open_folder / "secret").write_text("secret")
    (open_folder / "link").symlink_to(folder)
    return folder


def jailed(run: Run, attempt: str, argument: Any, library: Path, **plan: Any) -> SimpleNamespace:
    return run(attempt, argument, where="jailed", namespaces=True, jail_root=True, readable=[str(library)], **plan)


def test_root_holds_only_libraries_and_null_device(run_plan: Run, nobody: bool, library: Path) -> None:
    paths = ["/dev", "/proc", "/etc/passwd", "/sys", str(library.parent), str(library), "/dev/null"]
    outcome = jailed(run_plan, "look_at_paths", paths, library, nobody=nobody)
    assert outcome.jailed
    assert outcome.result == {
        "/dev": ["null"],
        "/proc": errno.ENOENT,
        "/etc/passwd": errno.ENOENT,
        "/sys": errno.ENOENT,
        str(library.parent): ["library"],
        str(library): ["inside", "outside", "package"],
        "/dev/null": "",
    }


def test_symbolic_links_work_within_the_root(run_plan: Run, nobody: bool, library: Path) -> None:
    paths = [str(library / name) for name in ("inside", "outside")]
    outcome = jailed(run_plan, "look_at_paths", paths, library, nobody=nobody)
    assert list(outcome.result.values()) == ["text", errno.ENOENT]


def test_directory_is_bound_at_given_and_real_path(run_plan: Run, library: Path) -> None:
    link = library.parent / "link"
    paths = [str(folder / "package/file") for folder in (link, library)]
    outcome = jailed(run_plan, "look_at_paths", paths, link)
    assert list(outcome.result.values()) == ["text", "text"]


def test_root_is_read_only(run_plan: Run, nobody: bool, library: Path) -> None:
    library.chmod(0o777)
    paths = ["/", "/dev", str(library.parent), str(library), "/usr/lib"]
    outcome = jailed(run_plan, "write_to_paths", paths, library, nobody=nobody)
    assert set(outcome.result.values()) == {errno.EROFS}
    assert not (library / "written").exists()


def test_root_is_read_only_without_mount_setattr(run_plan: Run, nobody: bool, library: Path) -> None:
    library.chmod(0o777)
    plan = {"nobody": nobody, "deny": {"mount_setattr": errno.ENOSYS}}
    outcome = jailed(run_plan, "write_to_paths", ["/", str(library), "/usr/lib"], library, **plan)
    assert outcome.jailed
    assert set(outcome.result.values()) == {errno.EROFS}


def test_imports_work(run_plan: Run, library: Path) -> None:
    names = ["wave", "sqlite3", "sympy"]
    assert jailed(run_plan, "import_modules", names, library).result == names


def test_library_below_private_directory_is_accessible(run_plan: Run, tmp_path: Path) -> None:
    private = tmp_path / "private"
    (private / "library").mkdir(parents=True)
    (private / "library/file").write_text("text")
    private.chmod(0o700)
    path = str(private / "library/file")
    outcome = jailed(run_plan, "as_another_user", path, private / "library")
    # Without root, the process cannot change its user and is still the owner.
    assert outcome.result == "text"


def test_private_directory_is_inaccessible_without_jail_root(run_plan: Run, tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / "file").write_text("text")
    outcome = run_plan("as_another_user", str(private / "file"), where="jailed", namespaces=True)
    assert outcome.result == (errno.EACCES if os.geteuid() == 0 else "text")


@pytest.mark.parametrize("call", ["mount", "mount_setattr", "pivot_root", "unshare"])
def test_old_root_is_intact_if_the_kernel_refuses(run_plan: Run, nobody: bool, library: Path, call: str) -> None:
    plan = {"nobody": nobody, "jail_root": True, "where": "jailed", "readable": [str(library)]}
    outcome = run_plan("root_and_mounts", **plan, namespaces=call != "unshare", deny={call: errno.EPERM})
    assert not outcome.jailed
    names, _, mounts = run_plan("root_and_mounts", where="plain").result
    assert outcome.result == [names, "/", mounts]


def test_machine_mounts_are_not_changed(run_plan: Run, library: Path) -> None:
    """Even as root in the machine's mount namespace."""
    before = Path("/proc/self/mountinfo").read_text()
    plan = {"where": "jailed", "jail_root": True, "readable": [str(library)]}
    outcome = run_plan("look_at_paths", ["/etc/passwd"], **plan)
    assert outcome.jailed == (outcome.result == {"/etc/passwd": errno.ENOENT})
    assert outcome.jailed == (os.geteuid() == 0)
    assert Path("/proc/self/mountinfo").read_text() == before
